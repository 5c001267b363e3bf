import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// Prompts with pictures: every stage as Python has it, bit for bit where the ONNX Runtime is the same.
    @Suite(.enabled(if: Fixtures.isRunnable("minicpmv4_7-float"))) struct Vision {
        static let name = "minicpmv4_7-float"
        private let bundle: ModelBundle
        private let vision: VisionRecord
        private let reference: Reference
        private let hasBits: Bool
        private let tokenizer: any Tokenizer
        private let environment: OrtEnvironment

        init() throws {
            bundle = try Fixtures.bundle(Self.name)
            vision = try bundle.eyes()
            (reference, hasBits) = try Fixtures.reference(Self.name)
            tokenizer = try BytePairTokenizer(file: bundle.file(try #require(bundle.manifest.tokenizer?.jsonPath)))
            environment = try OrtEnvironment.shared(numThreads: reference.numThreads)
            try #require(reference.vision.count == 3)
        }

        private func options(_ change: (inout LoadOptions) -> Void = { _ in }) -> LoadOptions {
            var options = LoadOptions()
            options.numThreads = reference.numThreads
            change(&options)
            return options
        }

        /// The prompt of a case, its pictures not seen yet.
        private func prompt(_ test: Reference.Pictured) throws -> (tokenIds: [Int], pictures: PromptPictures) {
            let made = try bundle.expand(test.prompt, reference.pictures(test), tokenizer, addSpecialTokens: true)
            return (made.tokenIds, try #require(made.pictures))
        }

        /// The same, seen.
        private func seen(_ test: Reference.Pictured) throws -> PromptPictures {
            let pictures = try prompt(test).pictures
            let eyes = try Eyes(bundle, environment)
            for number in pictures.keys.indices {
                var reading = try Eyes.Reading(try #require(pictures.picture(number)), pictures.views[number], bundle)
                while !reading.isDone {
                    try eyes.see(&reading)
                }
                pictures.see(number, reading.features)
            }
            return pictures
        }

        private func isNear(_ found: Tensor, _ expected: Data, _ tolerance: Float) -> Bool {
            let values = expected.withUnsafeBytes { Array($0.bindMemory(to: Float.self)) }
            return values.count == found[Float.self].count && zip(found[Float.self], values).allSatisfy { abs($0 - $1) <= tolerance }
        }

        @Test("tokens, views, positions, pixels and features")
        func stages() throws {
            let eyes = try Eyes(bundle, environment)
            for test in reference.vision {
                let (tokenIds, pictures) = try prompt(test)
                #expect(tokenIds == test.promptIds && pictures.positions == test.positionIds, "\(test.name)")
                let views = pictures.views.map { $0.map { [$0.size.height, $0.size.width, $0.grid.height, $0.grid.width] } }
                #expect(views == test.views, "\(test.name)")
                let (pixels, features) = (try reference.data(test.pixelValues), try reference.data(test.features))
                var (prepared, found) = (Data(), Data())
                for (number, picture) in try reference.pictures(test).enumerated() {
                    for view in pictures.views[number] {
                        let packed = try eyes.prepare(picture, view)
                        for crop in 0..<view.numCrops {
                            let own = eyes.crop(crop, of: view, packed)
                            prepared += Data(bytes: own.pointer, count: own.byteCount)
                        }
                    }
                    var reading = try Eyes.Reading(picture, pictures.views[number], bundle)
                    while !reading.isDone {
                        try eyes.see(&reading)
                    }
                    found += Data(bytes: reading.features.pointer, count: reading.features.byteCount)
                }
                #expect(prepared.count == pixels.count && found.count == features.count, "\(test.name)")
                if hasBits {
                    let areEqual = (prepared == pixels, found == features)
                    #expect(areEqual.0 && areEqual.1, "\(test.name): \(areEqual)")
                }
            }
        }

        @Test("logits and tokens under every schedule, by both engines, in chunks of any size")
        func everySchedule() throws {
            let seen = try reference.vision.map { try self.seen($0) }
            func run(_ engine: EngineChoice, _ schedule: Schedule, _ chunk: Int?) throws {
                let budget = schedule == .resident ? bundle.expertBytes : max(bundle.leastBudgetBytes, bundle.expertBytes / 4)
                let runner = try Runners.make(bundle, reference, engine, schedule, budget, chunk: chunk)
                defer { runner.close() }
                for (test, pictures) in zip(reference.vision, seen) {
                    let place = "\(test.name) \(engine) \(schedule) \(chunk ?? 0)"
                    try runner.rewind(to: 0)
                    let logits = try reference.data(test.logits)
                    // Python's rows are the kernel's, in whole chunks.
                    let isExact = hasBits && engine == .kernel && chunk == nil
                    try compare(runner, test, pictures, logits, isExact, place)
                }
            }
            for schedule in Schedule.allCases {
                try run(.kernel, schedule, nil)
            }
            try run(.session, .les, nil)
            for chunk in [1, 7, 24] {
                try run(.kernel, .les, chunk)
            }
        }

        private func compare(
            _ runner: Runner, _ test: Reference.Pictured, _ pictures: PromptPictures, _ expected: Data, _ isExact: Bool, _ place: String
        ) throws {
            var logits = try runner.prefill(test.promptIds, pictures: pictures)
            var sampler = Sampler(.greedy)
            let rowBytes = bundle.manifest.model.vocabSize * 4
            for (row, token) in test.tokenIds.enumerated() {
                if row > 0 {
                    logits = try runner.step([test.tokenIds[row - 1]], logitRows: [0])
                }
                let wanted = expected[row * rowBytes..<(row + 1) * rowBytes]
                let isEqual = isExact
                    ? Data(bytes: logits.pointer, count: logits.byteCount) == wanted : isNear(logits, Data(wanted), 1e-3)
                #expect(isEqual, "\(place): logits of row \(row)")
                #expect(try sampler.sample(UnsafeBufferPointer(logits[Float.self])) == token, "\(place): token \(row)")
                if !isEqual { return }
            }
        }

        @Test("a rewind into a picture goes on with the rest of it")
        func rewind() throws {
            let test = reference.vision[1]
            let pictures = try seen(test)
            let runner = try Runners.make(bundle, reference, .kernel, .les, bundle.expertBytes, chunk: 7)
            defer { runner.close() }
            let last = try #require(test.promptIds.lastIndex(of: vision.tokens.image))
            let ids = Array(test.promptIds[...last])
            let first = Array(try runner.prefill(ids, pictures: pictures)[Float.self])
            // Behind the prompt's pictures, positions go on from the greatest.
            _ = try runner.step([5, 6, 7], logitRows: [])
            try runner.rewind(to: ids.count)
            try runner.rewind(to: 0)
            _ = try runner.prefill(ids, pictures: pictures)
            let back = (ids.count - 1) % 7
            try #require(back > 0)
            try runner.rewind(to: ids.count - back)
            let again = try runner.prefill(Array(ids.suffix(back)), pictures: pictures)
            #expect(zip(first, again[Float.self]).allSatisfy { abs($0 - $1) < 1e-4 })
        }

        @Test("a model gives Python's tokens from texts and from ids, with drafts and without", arguments: [DrafterName.none, .ngram])
        func generate(draft: DrafterName) async throws {
            let model = try await Model.load(bundle, options { $0.draft = draft })
            for test in reference.vision {
                let pictures = try reference.pictures(test)
                let bare = try tokenizer.encode(test.prompt, addSpecialTokens: true)
                for prompt in [Prompt.text(test.prompt), .ids(bare)] {
                    let before = await model.eyes.numCrops
                    let generation = try await model.generate(
                        prompt, GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true), images: pictures)
                    _ = try await generation.text()
                    let report = await generation.report
                    #expect(report.tokenIds == test.tokenIds, "\(test.name)")
                    #expect(report.pictures == pictures.count && report.promptTokens == test.promptIds.count)
                    #expect(report.imageTokens == test.promptIds.count { $0 == vision.tokens.image } && report.visionMs > 0)
                    let after = await model.eyes
                    // Known ones are not read again.
                    #expect(!after.areOpen && (after.numCrops > before) == (prompt == .text(test.prompt)))
                }
            }
            // A text without pictures, after them: as on a bundle without eyes.
            let test = try #require(reference.cases.first { $0.name == "greedy-kernel" })
            let generation = try await model.generate(
                .ids(test.promptIds), GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true))
            _ = try await generation.text()
            #expect(await generation.report.tokenIds == test.tokenIds)
            await model.close()
        }

        @Test("drafts behind a picture lie where plain decoding has them")
        func drafts() throws {
            let test = reference.vision[1]
            let pictures = try seen(test)
            let runner = try Runners.make(bundle, reference, .kernel, .les, bundle.expertBytes)
            defer { runner.close() }
            for wrong in [UInt32(0), 40] {
                let oracle = Oracle(
                    test.tokenIds, after: test.promptIds.count, wrong: wrong, vocabSize: bundle.manifest.model.vocabSize)
                let speculator = Speculator(runner, oracle, pricing: Always(length: 5))
                var generator = try Generator(
                    test.promptIds, GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true), bundle.manifest.model,
                    maxTokens: runner.states.maxTokens, decoding: nil, reuses: false, pictures: pictures)
                while try generator.runChunk(runner, speculator) {}
                while try generator.next(runner, speculator) != nil {}
                #expect(generator.report.tokenIds == test.tokenIds)
                #expect(try #require(generator.report.drafts).numAccepted > 0)
            }
        }

        @Test("a conversation computes only what is new, as far as its pictures are the same")
        func chat() async throws {
            let model = try await Model.load(bundle, options())
            let wanted = GenerationOptions(maxNewTokens: 4, ignoresEos: true)
            let picture = try reference.pictures(reference.vision[1])[0]
            func ask(_ messages: [ChatMessage]) async throws -> (text: String, report: GenerationReport) {
                let generation = try await model.chat(messages, wanted)
                let text = try await generation.text()
                return (text, await generation.report)
            }
            var messages = [ChatMessage(role: .user, content: "What is this?", images: [picture])]
            let first = try await ask(messages)
            let crops = await model.eyes.numCrops
            #expect(first.report.pictures == 1 && crops == 5)
            messages += [ChatMessage(role: .assistant, content: first.text), ChatMessage(role: .user, content: "And where?")]
            let second = try await ask(messages)
            #expect(second.report.pictures == 1 && second.report.imageTokens == first.report.imageTokens)
            #expect(await model.eyes.numCrops == crops)
            // From scratch the same.
            let fresh = try await Model.load(bundle, options())
            let plain = try await fresh.chat(messages, wanted)
            _ = try await plain.text()
            #expect(await plain.report.tokenIds == second.report.tokenIds)
            await fresh.close()
            // Another picture of the same size has the same ids, and is another.
            var rgb = picture.rgb
            rgb[0] ^= 255
            let other = try Picture(height: picture.height, width: picture.width, rgb: rgb)
            messages[0].images = [other]
            let third = try await ask(messages)
            let start = try #require(reference.vision[1].promptIds.firstIndex(of: vision.tokens.image))
            #expect(third.report.reusedTokens <= start + 8 && third.report.promptTokens == second.report.promptTokens)
            #expect(await model.eyes.numCrops == 2 * crops)
            await model.close()
        }

        @Test("a prompt begins with what has run only as far as its pictures are the same, at the same places")
        func common() throws {
            let test = reference.vision[2]
            let images = try reference.pictures(test)
            let views = try images.map { try vision.views(height: $0.height, width: $0.width) }
            let longer = test.promptIds + [5, 6]
            func pictures(_ images: [Picture]) throws -> PromptPictures { try PromptPictures(longer, images, views: views, vision) }
            var history = History(positionRows: 3)
            for range in [0..<40, 40..<test.promptIds.count] {
                history.append(Array(longer[range]), at: history.next(range.count, of: try pictures(images)), of: try pictures(images))
            }
            #expect(history.common(longer, try pictures(images)) == test.promptIds.count)
            #expect(history.common(test.promptIds, try pictures(images)) == test.promptIds.count - 1)
            var rgb = images[1].rgb
            rgb[0] ^= 255
            let other = try Picture(height: images[1].height, width: images[1].width, rgb: rgb)
            let starts = longer.indices.filter { longer[$0] == vision.tokens.imageStart }
            #expect(history.common(longer, try pictures([images[0], other])) == starts[1] + 1)
            // As text, the same ids lie elsewhere from the first mark on.
            #expect(history.common(longer, nil) == starts[0])
            history.rewind(to: starts[1] + 1)
            #expect(history.common(longer, try pictures([images[0], other])) == starts[1] + 1)
        }

        @Test("experts give way while pictures are read, and have it back")
        func memory() throws {
            let test = reference.vision[1]
            let (tokenIds, pictures) = try prompt(test)
            let picture = try #require(pictures.picture(0))
            let runner = try Runners.make(bundle, reference, .kernel, .les, bundle.expertBytes)
            defer { runner.close() }
            let sight = Sight(bundle, environment)
            let held = picture.rgb.count + (try bundle.featureBytes(pictures.views[0]))
            let reading = try bundle.readingBytes(Extent(picture.height, picture.width), pictures.views[0])
            let states = runner.states.bytes(at: runner.states.capacity(for: 1))
            func bound(_ experts: Int) -> MemoryBound {
                let bytes = Int((Double(experts) * runner.loader.engine.memoryPerByte).rounded(.up))
                return MemoryBound(budgetBytes: states + held + reading + bytes, fixedBytes: 0)
            }
            runner.memoryBound = bound(bundle.leastBudgetBytes - 4096)
            do {
                try sight.begin(pictures, from: 0, runner)
                Issue.record("it had no room")
            } catch LesonnxError.budget(let why) {
                #expect(why.contains("reading pictures \(held + reading), and the experts need at least") && !why.contains("\n"))
            }
            #expect(runner.loader.expertBudgetBytes == bundle.expertBytes && !sight.isOpen)
            let granted = bundle.leastBudgetBytes + 8192
            runner.memoryBound = bound(granted)
            try sight.begin(pictures, from: 0, runner)
            #expect((granted..<granted + 4096).contains(runner.loader.expertBudgetBytes))
            #expect(try sight.seeCrop(pictures, runner) && sight.isOpen)
            // Whoever stops there gives it back too.
            sight.stop(runner)
            #expect(!sight.isOpen && runner.loader.expertBudgetBytes == bundle.expertBytes)
            try sight.begin(pictures, from: 0, runner)
            #expect(runner.loader.expertBudgetBytes < bundle.expertBytes)
            while try sight.seeCrop(pictures, runner) {}
            #expect(!sight.isOpen && sight.numCrops == 6 && runner.loader.expertBudgetBytes == bundle.expertBytes)
            let logits = try runner.prefill(tokenIds, pictures: pictures)
            #expect(isNear(logits, Data(try reference.data(test.logits).prefix(logits.byteCount)), 1e-3))
            // Text alone holds nothing of pictures.
            try sight.begin(nil, from: 0, runner)
            #expect(runner.memoryBound?.pictureBytes == 0 && sight.featureBytes == 0)
        }

        @Test("whoever stops between two crops loses nothing")
        func stopped() async throws {
            let test = reference.vision[1]
            let pictures = try reference.pictures(test)
            let model = try await Model.load(bundle, options { $0.memoryBudgetBytes = 2 << 30 })
            let wanted = GenerationOptions(maxNewTokens: test.tokenIds.count, ignoresEos: true)
            let generation = try await model.generate(.text(test.prompt), wanted, images: pictures)
            let task = Task { try await generation.text() }
            while await model.eyes.numCrops == 0 {
                await Task.yield()
            }
            task.cancel()
            _ = try? await task.value
            #expect(await !model.eyes.areOpen)
            let again = try await model.generate(.text(test.prompt), wanted, images: pictures)
            _ = try await again.text()
            #expect(await again.report.tokenIds == test.tokenIds)
            await model.close()
            await #expect(throws: LesonnxError.input("the model is closed")) {
                try await model.generate(.text(test.prompt), wanted, images: pictures)
            }
        }

        @Test("pictures that cannot be served are refused in one line")
        func refused() async throws {
            func refusal(_ body: () async throws -> Void) async -> String {
                do {
                    try await body()
                    return "nothing was refused"
                } catch {
                    #expect((error as? LesonnxError)?.isInput == true && !"\(error)".contains("\n"), "\(error)")
                    return "\(error)"
                }
            }
            let picture = try Picture(height: 2, width: 2, rgb: Array(repeating: 7, count: 12))
            let narrow = try Picture(height: 1, width: 900, rgb: Array(repeating: 7, count: 2700))
            let blind = try await Model.load(Fixtures.bundle("qwen3_moe-float"), options())
            #expect(
                await refusal { _ = try await blind.generate(.ids([1, 2]), images: [picture]) }
                    == "qwen3_moe-float: has no eyes; it takes no pictures")
            await blind.close()
            let model = try await Model.load(bundle, options())
            let mark = vision.texts.placeholder
            #expect(
                await refusal { _ = try await model.generate(.text("\(mark) and \(mark)"), images: [picture]) }
                    == "the prompt has 2 placeholders '\(mark)' for 1 picture, expected one a picture")
            #expect(await refusal { _ = try await model.generate(.text("a \(mark)")) }.contains("1 placeholder"))
            #expect(
                await refusal { _ = try await model.generate(.ids([5]), images: [picture]) }
                    == "the prompt's ids hold the image token 373 0 times, expected once a picture: 1")
            #expect(await refusal { _ = try await model.generate(.text("x"), images: [narrow]) }.contains("is too narrow"))
            let answer = ChatMessage(role: .assistant, content: "", images: [picture])
            #expect(
                await refusal { _ = try await model.chat([answer]) }
                    == "a message of the role assistant has a picture, expected only a user's")
            let many = Array(repeating: picture, count: 300)
            #expect(await refusal { _ = try await model.generate(.text(""), images: many) }.contains("context of 1024"))
            await model.close()
        }
    }
}

/// Pictures in files, as far as any system decodes them.
@Suite struct PictureFileTests {
    @Test func files() throws {
        let folder = FileManager.default.temporaryDirectory.appending(path: "lesonnx-\(UUID().uuidString)")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(at: folder) }
        let (good, bad) = (folder.appending(path: "good.ppm"), folder.appending(path: "bad.png"))
        try Data("P6 1 2 255 abcdef".utf8).write(to: good)
        try Data("sheep".utf8).write(to: bad)
        let picture = try Picture(file: good)
        #expect(picture.height == 2 && picture.width == 1 && picture.rgb == Array("abcdef".utf8))
        for (file, why) in [(bad, ": not a "), (folder, ": not readable"), (folder.appending(path: "none"), ": not readable")] {
            do {
                _ = try Picture(file: file)
                Issue.record("\(file) was taken")
            } catch {
                let found = "\(error)"
                #expect(error.isInput && found.hasPrefix(file.path(percentEncoded: false) + why) && !found.contains("\n"))
            }
        }
    }
}

/// Where tokens lie, without a model.
@Suite struct PositionsTests {
    @Test func threeRows() {
        var positions = Positions(rows: 3)
        positions.append([[0, 1, 1, 1], [0, 0, 3, 1], [0, 0, 1, 9]])
        #expect(positions.next(2) == [[10, 11], [10, 11], [10, 11]])
        positions.append(positions.next(2))
        #expect(positions.next(1) == [[12], [12], [12]])
        positions.rewind(to: 3)
        #expect(positions.next(2) == [[4, 5], [4, 5], [4, 5]])
        #expect(positions.isEqual(at: 0, to: nil) && !positions.isEqual(at: 1, to: nil))
        #expect(positions.isEqual(at: 1, to: [[0, 1], [0, 0], [0, 0]]) && !positions.isEqual(at: 1, to: [[0, 1], [0, 1], [0, 0]]))
        positions.rewind(to: 0)
        #expect(positions.next(1) == [[0], [0], [0]])
    }

    @Test func oneRow() {
        var positions = Positions(rows: 1)
        positions.append(positions.next(5))
        positions.rewind(to: 3)
        #expect(positions.next(2) == [[3, 4]] && positions.isEqual(at: 1, to: nil))
    }
}
