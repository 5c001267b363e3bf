package dev.lesonnx

import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.DynamicTest.dynamicTest
import org.junit.jupiter.api.TestFactory

/** Logits bit for bit those of the Python runner, and so the tokens, whatever the schedule and the budget. */
class ReferenceTest {
    @TestFactory
    fun `logits are Python's under every schedule and budget`(): List<DynamicTest> = Reference.BUNDLES.flatMap { name ->
        val reference = Reference.of(name)
        val bundle = Bundle(Reference.bundle(name))
        reference.cases.flatMap { case ->
            combinations(reference, case).map { (schedule, budget) ->
                dynamicTest("$name ${case.name} $schedule $budget") {
                    val bytes = reference.expertBudgetBytes.getValue(budget)
                    openRunner(bundle, LoadOptions(schedule, case.engine, expertBudgetBytes = bytes)).use { assertIsReference(it, case) }
                }
            }
        }
    }

    /**
     * All for greedy cases of the kernel; sampled ones take other tokens, but the same way. That sessions care for no schedule
     * either, one bundle says.
     */
    private fun combinations(reference: Reference, case: Reference.Case): List<Pair<String, String>> = when {
        case.sampling != null -> listOf("les" to "quarter")
        case.engine == "session" && reference.bundle != "sample-int4" -> listOf("les" to "least")
        else -> SCHEDULES.flatMap { schedule -> reference.expertBudgetBytes.keys.map { schedule to it } }
            .filter { (schedule, budget) -> schedule != "resident" || budget == "all" }
    }

    @TestFactory
    fun `what follows a step that is taken back in part is Python's`(): List<DynamicTest> = Reference.BUNDLES.flatMap { name ->
        val reference = Reference.of(name)
        val bundle = Bundle(Reference.bundle(name))
        reference.rewinds.flatMap { case ->
            listOf("les" to "quarter", "on-demand" to "least").map { (schedule, budget) ->
                dynamicTest("$name ${case.name} $schedule $budget") {
                    val bytes = reference.expertBudgetBytes.getValue(budget)
                    openRunner(bundle, LoadOptions(schedule, case.engine, expertBudgetBytes = bytes)).use { assertIsReference(it, case) }
                }
            }
        }
    }

    @TestFactory
    fun `techniques one by one do not change a bit`(): List<DynamicTest> {
        val reference = Reference.of("sample-int4")
        val bundle = Bundle(Reference.bundle("sample-int4"))
        val quarter = reference.expertBudgetBytes.getValue("quarter")
        return listOf(
            LoadOptions(policy = "lfu"),
            LoadOptions(policy = "lru", lookahead = false),
            LoadOptions(numLoaders = 1),
            LoadOptions(numLoaders = 9),
            LoadOptions(computeFirst = false),
            LoadOptions(schedule = "cache", computeFirst = true, lookahead = true),
        ).map { options ->
            dynamicTest("$options") {
                openRunner(bundle, options.copy(expertBudgetBytes = quarter)).use { assertIsReference(it, reference.case("greedy-kernel")) }
            }
        }
    }
}
