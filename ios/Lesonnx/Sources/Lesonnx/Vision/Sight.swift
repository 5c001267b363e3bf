import LesonnxScheduler

/// Reads the pictures of a model's prompts, and keeps the features of those of the latest prompt: a conversation's pictures are seen
/// once. Owned by a model; used from the runner's thread.
///
/// Eyes are open only while pictures are read; with a memory budget the experts give way for that time.
final class Sight {
    private let bundle: ModelBundle
    private let environment: OrtEnvironment
    private var features: [PictureKey: Tensor] = [:]
    private var eyes: Eyes?
    private var reading: Eyes.Reading?
    /// Numbers of the prompt's pictures that are to be read.
    private var waiting: [Int] = []
    /// Of the latest prompt's pictures.
    private var pixelBytes = 0

    init(_ bundle: ModelBundle, _ environment: OrtEnvironment) {
        self.bundle = bundle
        self.environment = environment
    }

    /// Whether eyes are open, and how many crops they have read in all.
    var isOpen: Bool { eyes != nil }
    private(set) var numCrops = 0
    /// Whether pictures are still to be read.
    var isReading: Bool { !waiting.isEmpty }

    /// What stays known, in bytes.
    var featureBytes: Int { features.values.reduce(0) { $0 + $1.byteCount } }

    /// A generation begins whose tokens from `place` on are to run. What was seen of other prompts is forgotten. Throws `budget` where
    /// reading its pictures has no room.
    func begin(_ pictures: PromptPictures?, from place: Int, _ runner: Runner) throws {
        leave()
        let keys = Set(pictures?.keys ?? [])
        features = features.filter { keys.contains($0.key) }
        pixelBytes = pictures?.pixelBytes ?? 0
        guard let pictures else { return try rest(runner) }
        for (number, key) in pictures.keys.enumerated() {
            features[key].map { pictures.see(number, $0) }
        }
        waiting = pictures.unseen(from: place)
        if waiting.isEmpty {
            return try rest(runner)
        }
        var (reading, seen) = (0, featureBytes + pixelBytes)
        for number in waiting {
            guard let picture = pictures.picture(number) else { continue }
            reading = max(reading, try bundle.readingBytes(Extent(picture.height, picture.width), pictures.views[number]))
            seen += try bundle.featureBytes(pictures.views[number])
        }
        // The experts give way before anything is opened: the budget holds at every moment.
        do {
            try runner.make(room: seen + reading, for: "reading pictures")
        } catch {
            leave()
            throw error
        }
    }

    /// Read the next crop; false where nothing is left to read, and the eyes are closed.
    func seeCrop(_ pictures: PromptPictures, _ runner: Runner) throws -> Bool {
        guard let number = waiting.first else { return false }
        if let known = features[pictures.keys[number]] {
            // The same picture twice.
            pictures.see(number, known)
            waiting.removeFirst()
            return try goOn(runner)
        }
        let eyes = try self.eyes ?? Eyes(bundle, environment)
        self.eyes = eyes
        guard let picture = pictures.picture(number) else { throw LesonnxError.failure("picture \(number) is not there") }
        var current = try reading ?? Eyes.Reading(picture, pictures.views[number], bundle)
        reading = nil
        try eyes.see(&current)
        numCrops += 1
        if current.isDone {
            features[pictures.keys[number]] = current.features
            pictures.see(number, current.features)
            waiting.removeFirst()
        } else {
            reading = current
        }
        return try goOn(runner)
    }

    private func goOn(_ runner: Runner) throws -> Bool {
        if !waiting.isEmpty {
            return true
        }
        leave()
        try rest(runner)
        return false
    }

    /// Close the eyes, whatever is still to be read.
    func leave() {
        eyes = nil
        reading = nil
        waiting = []
    }

    /// Whoever asked wants no more, or reading failed: the eyes close, and the experts have their memory back.
    func stop(_ runner: Runner) {
        leave()
        // What they had before reading fits again.
        try? rest(runner)
    }

    /// The experts have back what reading took, but for what stays: features, and pixels, which whoever asked may hold on to.
    private func rest(_ runner: Runner) throws { try runner.make(room: featureBytes + pixelBytes, for: "pictures") }
}
