package dev.lesonnx

import java.nio.file.Path
import kotlin.io.path.listDirectoryEntries
import kotlinx.serialization.json.JsonArray
import kotlinx.serialization.json.JsonElement
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.add
import kotlinx.serialization.json.addJsonArray
import kotlinx.serialization.json.boolean
import kotlinx.serialization.json.buildJsonArray
import kotlinx.serialization.json.buildJsonObject
import kotlinx.serialization.json.jsonArray
import kotlinx.serialization.json.jsonObject
import kotlinx.serialization.json.jsonPrimitive
import kotlinx.serialization.json.put
import kotlinx.serialization.json.putJsonArray
import kotlinx.serialization.json.putJsonObject

/** Golden traces as JSON: how events and actions are written, and what a scheduler answers to written events. */
internal object GoldenTraces {
    val files: List<Path> = TestData.data.resolve("traces").listDirectoryEntries("*.json").sorted()

    fun makeScheduler(trace: JsonObject): Scheduler {
        check(trace.getValue("format").int == 1) { "a trace of another format" }
        return Scheduler(
            trace.getValue("layers").jsonArray.map { layer(it.jsonObject) },
            trace.getValue("budget_bytes").long,
            config(trace.getValue("config").jsonObject),
        )
    }

    private fun layer(json: JsonObject) = LayerShape(
        json.getValue("num_experts").int,
        json.getValue("num_experts_per_tok").int,
        json.getValue("cost_bytes").long,
        json.getValue("shared_cost_bytes").long,
    )

    private fun config(json: JsonObject): SchedulerConfig {
        check(json.size == 10) { "a trace of another format: its config has ${json.keys}" }
        return SchedulerConfig(
            policy = json.getValue("policy").jsonPrimitive.content,
            maxLoads = json.getValue("max_loads").int,
            computeFirst = json.getValue("compute_first").jsonPrimitive.boolean,
            lookahead = json.getValue("lookahead").jsonPrimitive.boolean,
            lookaheadLoads = json.getValue("lookahead_loads").int,
            lookaheadBytes = json.getValue("lookahead_bytes").long,
            lookaheadOdds = json.getValue("lookahead_odds").int,
            retain = json.getValue("retain").jsonPrimitive.boolean,
            resident = json.getValue("resident").jsonPrimitive.boolean,
            slabBytes = json.getValue("slab_bytes").long,
        )
    }

    /** The event with the scheduler's own answer in the place of the written one. */
    fun answer(scheduler: Scheduler, event: JsonObject): JsonObject {
        val arguments = event.filterKeys { it != "actions" && it != "error" }
        return try {
            val actions = send(scheduler, event)
            JsonObject(arguments + ("actions" to JsonArray(actions.map(::write))))
        } catch (_: LoadError) {
            JsonObject(arguments + ("error" to JsonPrimitive("load")))
        }
    }

    private fun send(scheduler: Scheduler, event: JsonObject): List<Action> {
        fun int(key: String) = event.getValue(key).int
        return when (val name = event.getValue("event").jsonPrimitive.content) {
            "begin_step" -> scheduler.beginStep(int("rows"), int("drafts"))
            "route" -> {
                val rows = event.getValue("expert_ids").jsonArray
                scheduler.route(int("layer"), Array(rows.size) { ints(rows[it]) })
            }
            "predict" -> {
                val rows = event.getValue("scores").jsonArray
                scheduler.predict(int("layer"), rows.flatMap { ints(it).asList() }.toIntArray())
            }
            "loaded" -> scheduler.loaded(int("expert"), event.getValue("read_us").long)
            "load_failed" -> scheduler.loadFailed(int("expert"))
            "computed" -> scheduler.computed(ints(event.getValue("experts")))
            "end_layer" -> scheduler.endLayer()
            "accept" -> scheduler.accept(ints(event.getValue("rows")))
            "pressure" -> scheduler.pressure(event.getValue("budget_bytes").long)
            else -> error("a trace of another format: event $name")
        }
    }

    private fun write(action: Action): JsonElement = buildJsonArray {
        when (action) {
            is Action.Load -> {
                add("load")
                add(action.expert)
                add(if (action.lookahead) "lookahead" else "demand")
                add(action.slab)
                add(action.offsetBytes)
            }
            is Action.Evict -> listOf(JsonPrimitive("evict"), JsonPrimitive(action.expert)).forEach(::add)
            is Action.Compute -> {
                add("compute")
                action.experts.forEach { add(it) }
            }
            is Action.Promote -> listOf(JsonPrimitive("promote"), JsonPrimitive(action.expert)).forEach(::add)
            is Action.Cancel -> listOf(JsonPrimitive("cancel"), JsonPrimitive(action.expert)).forEach(::add)
        }
    }

    /** What is left at the end, as a trace's `end` has it. */
    fun end(scheduler: Scheduler): JsonObject = buildJsonObject {
        putJsonObject("counters") {
            put("hits", scheduler.counters.hits)
            put("late", scheduler.counters.late)
            put("misses", scheduler.counters.misses)
            put("demand_bytes", scheduler.counters.demandBytes)
            put("lookahead_bytes", scheduler.counters.lookaheadBytes)
            put("lookahead_loads", scheduler.counters.lookaheadLoads)
            put("lookahead_used", scheduler.counters.lookaheadUsed)
            put("lookahead_wasted", scheduler.counters.lookaheadWasted)
            put("evictions", scheduler.counters.evictions)
        }
        put("committed_bytes", scheduler.committedBytes())
        put("lookahead_level", scheduler.lookaheadLevel)
        putJsonArray("slabs") {
            for (slab in scheduler.slabs()) {
                addJsonArray {
                    add(slab.lengthBytes)
                    add(slab.slotBytes)
                }
            }
        }
        putJsonArray("places") {
            for (expert in 0 until scheduler.numExperts) {
                if (scheduler.state(expert) < ExpertState.LOADING) continue
                addJsonArray {
                    add(expert)
                    add(scheduler.slab(expert))
                    add(scheduler.offsetBytes(expert))
                }
            }
        }
    }

    fun ints(json: JsonElement): IntArray = json.jsonArray.let { array -> IntArray(array.size) { array[it].int } }

    private val JsonElement.int: Int get() = jsonPrimitive.content.toInt()
    private val JsonElement.long: Long get() = jsonPrimitive.content.toLong()
}
