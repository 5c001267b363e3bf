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

    init(_ bundle: ModelBundle, _ environment: OrtEnvironment) {
        self.bundle = bundle
        self.environment = environment
    }

    /// Whether a session is open.
    var isOpen: Bool { eyes != nil }

    /// What stays known, in bytes.
    var featureBytes: Int { features.values.reduce(0) { $0 + $1.byteCount } }

    /// A generation begins whose tokens from `place` on are to run. What was seen of other prompts is forgotten.
    func begin(_ pictures: PromptPictures?, from place: Int, _ runner: Runner) throws {
        leave()
        let keys = Set(pictures?.keys ?? [])
        features = features.filter { keys.contains($0.key) }
        guard let pictures else { return try rest(runner) }
        for (number, key) in pictures.keys.enumerated() {
            features[key].map { pictures.see(number, $0) }
        }
        waiting = pictures.unseen(from: place)
        if waiting.isEmpty {
            return try rest(runner)
        }
        let sizes = waiting.map { (pixelBytes: pictures.picture($0)?.rgb.count ?? 0, views: pictures.views[$0]) }
        let seenBytes = try waiting.reduce(0) {
            $0 + (try bundle.eyes().numTokens(pictures.views[$1])) * bundle.manifest.model.hiddenSize * ElementType.float32.byteCount
        }
        // The experts give way before anything is opened: the budget holds at every moment.
        try runner.make(room: featureBytes + seenBytes + pictures.pixelBytes + bundle.readingBytes(sizes), for: "reading pictures")
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

    /// The experts have back what reading took.
    func rest(_ runner: Runner) throws { try runner.make(room: featureBytes, for: "pictures that were read") }
}
