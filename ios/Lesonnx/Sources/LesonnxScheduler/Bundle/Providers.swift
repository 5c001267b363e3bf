// Execution providers as a manifest lists them, and what of a list the installed ONNX Runtime has. It opens no session and knows no
// part.

/// An execution provider and its options, as ONNX Runtime names them.
public struct Provider: Equatable, Sendable {
    public static let cpu = Provider(name: "CPUExecutionProvider")
    /// Those that compute on the processor, where a model may be shared with the CPU provider.
    private static let onTheProcessor = [cpu.name, "XnnpackExecutionProvider"]
    /// Stands for a directory of the host's own, one a bundle, in the value of an option.
    public static let cacheDirectory = "{cache}"

    public let name: String
    public let options: [String: String]

    /// Whether it computes apart from the processor: a model of which the CPU provider would run a piece is slower there than without.
    public var isAccelerator: Bool { !Self.onTheProcessor.contains(name) }

    public init(name: String, options: [String: String] = [:]) {
        self.name = name
        self.options = options
    }

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        name = try record.required("name").string()
        options = try record.optional("options")?.dictionary { (field) throws(LesonnxError) in try field.string() } ?? [:]
        try record.end()
    }

    /// Those of a list that are `available`, in order, and a line on each other. Options that want a directory get `cache`; where
    /// there is none, they are left out.
    public static func installed(
        _ listed: [Provider], available: [String], cache: String? = nil
    ) -> (found: [Provider], notes: [String]) {
        var (found, notes): ([Provider], [String]) = ([], [])
        for provider in listed {
            if !available.contains(provider.name) {
                notes.append("the installed ONNX Runtime has no \(provider.name)")
                continue
            }
            let options = provider.options.compactMapValues { value in
                value.contains(cacheDirectory) ? cache.map { value.replacing(cacheDirectory, with: $0) } : value
            }
            found.append(Provider(name: provider.name, options: options))
        }
        return (found, notes)
    }
}

public enum Target: String, Equatable, Sendable, CaseIterable {
    case desktop, android, ios

    /// What this host is in a manifest's lists.
    #if os(iOS)
    public static let here = Target.ios
    #else
    public static let here = Target.desktop
    #endif
}

extension Field {
    /// Lists of providers by target.
    func providers() throws(LesonnxError) -> [Target: [Provider]] {
        var providers: [Target: [Provider]] = [:]
        for (key, list) in try dictionary({ (field) throws(LesonnxError) in try field.array(Provider.init) }) {
            guard let target = Target(rawValue: key) else {
                throw wrong("keys among \(Target.allCases.map(\.rawValue).joined(separator: ", "))")
            }
            providers[target] = list
        }
        return providers
    }
}
