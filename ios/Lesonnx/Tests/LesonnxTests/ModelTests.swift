import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// What an app calls.
    @Suite struct Models {
        private func options(_ change: (inout LoadOptions) -> Void = { _ in }) -> LoadOptions {
            var options = LoadOptions()
            options.numThreads = 2
            change(&options)
            return options
        }

        @Test("a stream gives Python's tokens and text", arguments: [EngineChoice.kernel, .session])
        func stream(engine: EngineChoice) async throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let (reference, _) = try Fixtures.reference("sample-int4")
            let model = try await Model.load(bundle, options { $0.engine = engine; $0.expertBudgetBytes = bundle.expertBytes / 4 })
            for test in reference.cases where test.engine == engine {
                let wanted = GenerationOptions(maxNewTokens: test.tokenIds.count, sampling: test.sampling)
                let generation = try await model.generate(.text(try #require(test.prompt)), wanted)
                var (ids, text): ([Int], String) = ([], "")
                for try await token in generation.tokens {
                    token.id.map { ids.append($0) }
                    text += token.text
                }
                let report = await generation.report
                #expect(report.tokenIds == test.tokenIds, "\(test.name)")
                #expect(ids == test.tokenIds, "\(test.name)")
                #expect(text == test.text, "\(test.name)")
                #expect(report.promptTokens == test.promptIds.count && report.finishReason == .length)
                #expect(report.tokensPerS > 0 && report.prefillMs > 0)
            }
            let telemetry = await model.telemetry
            #expect(telemetry.readBytes > 0 && telemetry.hits > 0)
            await model.close()
        }

        @Test("a memory budget and pressure change no token")
        func pressure() async throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let (reference, _) = try Fixtures.reference("sample-int4")
            let test = try #require(reference.cases.first { $0.name == "greedy-kernel" })
            let model = try await Model.load(bundle, options { $0.memoryBudgetBytes = 2 << 30 })
            let generation = try await model.generate(.ids(test.promptIds), GenerationOptions(maxNewTokens: test.tokenIds.count))
            var ids: [Int] = []
            for try await token in generation.tokens {
                token.id.map { ids.append($0) }
                switch ids.count {
                case 5:
                    let before = await model.expertBudgetBytes
                    #expect(try await model.respond(to: .warning) < before)
                case 10: #expect(try await model.respond(to: .critical) == bundle.tokenDemandBytes)
                case 20: #expect(try await model.respond(to: .normal) == bundle.expertBytes)
                default: break
                }
            }
            #expect(ids == test.tokenIds)
            await #expect(throws: LesonnxError.self) { try await model.grant(expertBudgetBytes: 4096) }
            await model.close()
        }

        @Test("a memory budget changes no token, and counts every kind of state",
            arguments: Fixtures.recurrent + ["smallthinker-float", "gemma4_text-float"])
        func memoryBudget(name: String) async throws {
            let (reference, _) = try Fixtures.reference(name)
            let test = try #require(reference.cases.first { $0.name == "greedy-kernel" })
            let bundle = try Fixtures.bundle(name)
            let capacity = min(BundleManifest.growthTokens, bundle.manifest.model.maxPositionEmbeddings)
            do {
                _ = try await Model.load(bundle, options { $0.memoryBudgetBytes = 1 << 20 })
                Issue.record("a megabyte was enough")
            } catch LesonnxError.budget(let found) {
                let stateBytes = bundle.manifest.stateBytes(capacityTokens: capacity)
                #expect(found.contains("attention caches of \(capacity) tokens \(stateBytes),"), "\(found)")
            }
            let model = try await Model.load(bundle, options { $0.memoryBudgetBytes = 1 << 30 })
            let wanted = GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true)
            for _ in 0..<2 {
                let generation = try await model.generate(.ids(test.promptIds), wanted)
                _ = try await generation.text()
                #expect(await generation.report.tokenIds == test.tokenIds)
            }
            await model.close()
        }

        @Test("a bundle that needs a newer ONNX Runtime is refused by its version")
        func tooOld() async throws {
            for name in Fixtures.names where !Fixtures.isRunnable(name) {
                do {
                    _ = try await Model.load(Fixtures.bundle(name), options())
                    Issue.record("\(name) was taken")
                } catch LesonnxError.bundle(let found) {
                    #expect(found.hasPrefix("the bundle needs ONNX Runtime 1."))
                }
            }
        }

        @Test("a budget beyond all experts, or beyond the first, is not in force")
        func budgetInForce() async throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let model = try await Model.load(bundle, options { $0.expertBudgetBytes = 2_000_000_000 })
            #expect(await model.expertBudgetBytes == bundle.expertBytes)
            // A warning gives memory up, however much was allowed.
            #expect(try await model.respond(to: .warning) == bundle.expertBytes / 2)
            #expect(try await model.respond(to: .normal) == bundle.expertBytes)
            await model.close()
            let small = try await Model.load(bundle, options { $0.expertBudgetBytes = bundle.tokenDemandBytes })
            try await small.grant(expertBudgetBytes: bundle.expertBytes)
            #expect(await small.expertBudgetBytes == bundle.tokenDemandBytes)
            await small.close()
        }

        @Test("between two chunks of a prompt, others have their turn", .timeLimit(.minutes(2)))
        func turns() async throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let ids = (0..<1200).map { 5 + $0 % 300 }
            let whole = try await Model.load(bundle, options { $0.prefillChunkTokens = 2 })
            func waitForPrompt() async {
                while true {
                    let ran = await whole.numTokens
                    if ran > 0 && ran < ids.count {
                        return
                    }
                    await Task.yield()
                }
            }
            let expected = try await whole.generate(.ids(ids), GenerationOptions(maxNewTokens: 3)).text()
            // Pressure while the prompt runs, and not after it.
            let generation = try await whole.generate(.ids(ids), GenerationOptions(maxNewTokens: 3))
            let task = Task { try await generation.text() }
            await waitForPrompt()
            #expect(try await whole.respond(to: .critical) == bundle.tokenDemandBytes)
            #expect(await whole.numTokens < ids.count)
            #expect(try await task.value == expected)
            // Closing ends a prompt.
            let second = try await whole.generate(.ids(ids))
            let ended = Task { try await second.text() }
            await waitForPrompt()
            await whole.close()
            await #expect(throws: LesonnxError.input("the model is closed")) { try await ended.value }
        }

        @Test("what the caller does between two tokens does not count as decoding")
        func slowCaller() async throws {
            let model = try await Model.load(Fixtures.bundle("sample-int4"), options())
            let generation = try await model.generate(.ids([5, 6, 7]), GenerationOptions(maxNewTokens: 4, ignoresEos: true))
            let began = secondsNow()
            for try await _ in generation.tokens {
                try await Task.sleep(for: .milliseconds(300))
            }
            let tookMs = (secondsNow() - began) * 1e3
            #expect(await generation.report.decodeMs < tookMs - 1200)
            await model.close()
        }

        @Test("a cancelled task ends its stream, and the model goes on")
        func cancelled() async throws {
            let (reference, _) = try Fixtures.reference("sample-int4")
            let test = try #require(reference.cases.first { $0.name == "greedy-kernel" })
            let model = try await Model.load(Fixtures.bundle("sample-int4"), options())
            let generation = try await model.generate(.ids(test.promptIds), GenerationOptions(maxNewTokens: 200))
            let task = Task {
                var count = 0
                do {
                    for try await _ in generation.tokens {
                        count += 1
                        if count == 3 {
                            withUnsafeCurrentTask { $0?.cancel() }
                        }
                    }
                } catch is CancellationError {}
                return count
            }
            #expect(try await task.value == 3)
            let again = try await model.generate(.ids(test.promptIds), GenerationOptions(maxNewTokens: 5))
            // The first generation is over: it may not go on in the other's sequence.
            var old = generation.tokens.makeAsyncIterator()
            do {
                #expect(try await old.next() == nil)
            } catch {
                #expect("\(error)".contains("another generation"))
            }
            for try await _ in again.tokens {}
            #expect(await again.report.tokenIds == Array(test.tokenIds.prefix(5)))
            await model.close()
        }

        @Test("a stop string ends the text before itself")
        func stop() async throws {
            let (reference, _) = try Fixtures.reference("sample-int4")
            let test = try #require(reference.cases.first { $0.name == "greedy-kernel" })
            let text = try #require(test.text)
            let model = try await Model.load(Fixtures.bundle("sample-int4"), options())
            let wanted = GenerationOptions(maxNewTokens: 40, stop: ["the LORD"])
            let generation = try await model.generate(.ids(test.promptIds), wanted)
            let cut = try #require(text.range(of: "the LORD"))
            #expect(try await generation.text() == String(text[..<cut.lowerBound]))
            #expect(await generation.report.finishReason == .stop)
            await model.close()
        }

        @Test("the second answer of a conversation computes only what is new")
        func chat() async throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let model = try await Model.load(bundle, options())
            var messages = [ChatMessage(role: .user, content: "Who made the heaven?")]
            if bundle.manifest.tokenizer?.chatFormat == nil {
                await #expect(throws: LesonnxError.self) { try await model.chat(messages) }
            } else {
                let first = try await model.chat(messages, GenerationOptions(maxNewTokens: 8))
                messages.append(ChatMessage(role: .assistant, content: try await first.text()))
                messages.append(ChatMessage(role: .user, content: "And the earth?"))
                let second = try await model.chat(messages, GenerationOptions(maxNewTokens: 8))
                _ = try await second.text()
                #expect(await second.report.reusedTokens > 0)
            }
            await model.close()
        }

        @Test("bad options and prompts are refused in one line")
        func refused() async throws {
            let bundle = try Fixtures.bundle("sample-int4")
            func refusal(_ body: () async throws -> Void) async -> String {
                do {
                    try await body()
                    return "nothing was refused"
                } catch {
                    #expect((error as? LesonnxError)?.isInput == true, "\(error)")
                    return "\(error)"
                }
            }
            let least = bundle.leastBudgetBytes
            #expect(
                await refusal { _ = try await Model.load(bundle, options { $0.expertBudgetBytes = least - 1 }) }
                    == "the expert budget is \(least - 1) bytes; this bundle needs at least \(least)")
            #expect(
                await refusal {
                    _ = try await Model.load(bundle, options { $0.schedule = .resident; $0.expertBudgetBytes = least })
                }.contains("schedule resident keeps all experts"))
            #expect(
                await refusal { _ = try await Model.load(bundle, options { $0.memoryBudgetBytes = 1 << 20 }) }
                    .hasPrefix("the memory budget is 1048576 bytes"))
            #expect(
                await refusal { _ = try await Model.load(bundle, options { $0.numLoaders = 0 }) }
                    == "numLoaders is 0, expected 1 to 64")
            #expect(
                await refusal { _ = try await Model.load(bundle, options { $0.memoryBudgetBytes = .min }) }
                    == "memoryBudgetBytes is \(Int.min), expected a number of bytes")
            #expect(LesonnxError.input("one line").localizedDescription == "one line")
            let model = try await Model.load(bundle, options())
            #expect(
                await refusal { _ = try await Model.load(bundle, options { $0.numThreads = 1 }) }.contains("runs on 2"))
            let most = bundle.manifest.model.maxPositionEmbeddings
            let vocab = bundle.manifest.model.vocabSize
            #expect(
                await refusal { _ = try await model.generate(.ids(Array(repeating: 5, count: most))) }
                    .contains("leaves no room in the model's context of \(most)"))
            #expect(
                await refusal { _ = try await model.generate(.ids([5]), GenerationOptions(maxNewTokens: most)) }
                    .contains("do not fit the model's context"))
            #expect(await refusal { _ = try await model.generate(.text("")) } == "the prompt is empty: at least one token is needed")
            #expect(
                await refusal { _ = try await model.generate(.ids([vocab])) } == "token id \(vocab) is outside 0..\(vocab - 1)")
            let generation = try await model.generate(.ids([5]))
            await model.close()
            #expect(await refusal { _ = try await generation.text() } == "the model is closed")
            await model.close()
        }

        #if os(Linux)
        @Test("nothing is left running after close")
        func threads() async throws {
            func names() throws -> [String] {
                try FileManager.default.contentsOfDirectory(atPath: "/proc/self/task").compactMap {
                    try? String(contentsOfFile: "/proc/self/task/\($0)/comm", encoding: .utf8)
                }.map { $0.trimmingCharacters(in: .whitespacesAndNewlines) }
            }
            func ours() throws -> [String] {
                try names().filter { $0.hasPrefix("loader") || $0.hasPrefix("lookahead") }
            }
            let bundle = try Fixtures.bundle("sample-int4")
            let folder = bundle.directory.resolvingSymlinksInPath().path
            func openFiles() throws -> [String] {
                try FileManager.default.contentsOfDirectory(atPath: "/proc/self/fd").compactMap {
                    try? FileManager.default.destinationOfSymbolicLink(atPath: "/proc/self/fd/\($0)")
                }.filter { $0.hasPrefix(folder) }
            }
            let model = try await Model.load(bundle, options { $0.numLoaders = 3 })
            let generation = try await model.generate(.ids([5, 6, 7]))
            var tokens = generation.tokens.makeAsyncIterator()
            _ = try await tokens.next()
            let running = try ours().sorted()
            #expect(running == ["loader 0", "loader 1", "loader 2", "lookahead"])
            #expect(try openFiles().count == bundle.manifest.expertLayers.count)
            #expect(OrtEnvironment.isThere && model.executor.isRunning)
            await model.close()
            for _ in 0..<200 where try !ours().isEmpty || OrtEnvironment.isThere || model.executor.isRunning {
                try await Task.sleep(for: .milliseconds(10))  // a thread's last steps, after it has said that it ends
            }
            let (threads, files) = (try ours(), try openFiles())
            #expect(threads == [])
            #expect(files == [])
            #expect(!OrtEnvironment.isThere && !model.executor.isRunning)
        }
        #endif
    }
}
