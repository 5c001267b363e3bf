private let units: [String: Double] = [
    "": 1, "B": 1, "K": 1e3, "KB": 1e3, "KIB": 1024, "M": 1e6, "MB": 1e6, "MIB": 1_048_576, "G": 1e9, "GB": 1e9,
    "GIB": 1_073_741_824, "T": 1e12, "TB": 1e12, "TIB": 1_099_511_627_776,
]

/// A size such as `3GB` (10^9), `2GiB` (2^30), `1.5M` or `4096`; throws `input` for anything else.
public func parseBytes(_ text: String) throws(LesonnxError) -> Int {
    let digits = text.prefix { $0.isASCII && ($0.isNumber || $0 == ".") }
    let unit = text.dropFirst(digits.count).drop { $0 == " " }.uppercased()
    guard digits.first?.isNumber == true, digits.last?.isNumber == true, let number = Double(digits), let factor = units[unit] else {
        throw .input("'\(text)' is not a size; write bytes or a unit, such as 3GB, 500MiB or 4096")
    }
    let bytes = number * factor
    if bytes >= 0x1p62 {
        throw .input("'\(text)' is more than any memory holds")
    }
    return Int(bytes)
}

/// A size for people, decimal units, three digits: `1.67 MB`.
public func formatBytes(_ bytes: Int) -> String {
    if abs(bytes) < 1000 {
        return "\(bytes) B"
    }
    var value = Double(bytes)
    var names = ["B", "kB", "MB", "GB", "TB"][...]
    while abs(value) >= 999.5 && names.count > 1 {
        value /= 1000
        names = names.dropFirst()
    }
    return "\(threeDigits(value)) \(names.first!)"
}

/// Two decimals below 10, one below 100, none beyond.
private func threeDigits(_ value: Double) -> String {
    let decimals = abs(value) < 9.995 ? 2 : abs(value) < 99.95 ? 1 : 0
    let factor = decimals == 2 ? 100 : decimals == 1 ? 10 : 1
    let scaled = Int((abs(value) * Double(factor)).rounded())
    let sign = value < 0 ? "-" : ""
    if decimals == 0 {
        return "\(sign)\(scaled)"
    }
    let fraction = String(scaled % factor)
    return "\(sign)\(scaled / factor)." + String(repeating: "0", count: decimals - fraction.count) + fraction
}
