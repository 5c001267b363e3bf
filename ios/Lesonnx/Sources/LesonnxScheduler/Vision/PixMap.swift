// Pictures without compression, which any system reads: binary PPM.

extension Picture {
    /// Whether bytes begin as a binary PPM does.
    public static func isPixMap(_ bytes: some Collection<UInt8>) -> Bool { bytes.starts(with: "P6".utf8) }

    /// The first picture of a binary PPM (P6) of 8 bits a channel. Throws `input`, naming `name`, for anything else.
    public init(pixMap bytes: [UInt8], name: String) throws(LesonnxError) {
        var at = 2
        func wrong(_ what: String) -> LesonnxError { .input("\(name): not a binary PPM (P6): \(what)") }
        func isSpace(_ byte: UInt8) -> Bool { byte == 0x20 || (0x09...0x0D).contains(byte) }
        /// White space and comments, then a number.
        func number(_ what: String) throws(LesonnxError) -> Int {
            while at < bytes.count, isSpace(bytes[at]) || bytes[at] == UInt8(ascii: "#") {
                if bytes[at] == UInt8(ascii: "#") {
                    at = bytes[at...].firstIndex { $0 == 0x0A || $0 == 0x0D } ?? bytes.count
                } else {
                    at += 1
                }
            }
            let digits = bytes[at...].prefix(10, while: { (0x30...0x39).contains($0) })
            guard let value = Int(String(decoding: digits, as: UTF8.self)), digits.count < 10 else { throw wrong("it has no \(what)") }
            at += digits.count
            return value
        }
        guard Self.isPixMap(bytes) else { throw wrong("it begins otherwise") }
        let width = try number("width")
        let height = try number("height")
        let most = try number("greatest value")
        guard most == 255 else { throw wrong("its greatest value is \(most), expected 255") }
        guard at < bytes.count, isSpace(bytes[at]) else { throw wrong("its pixels are missing") }
        at += 1
        guard width > 0, height > 0, let count = product(width, height, 3) else { throw wrong("it is \(width) x \(height) pixels") }
        guard bytes.count - at >= count else {
            throw wrong("\(width) x \(height) pixels take \(count) bytes, found \(bytes.count - at)")
        }
        try self.init(height: height, width: width, rgb: Array(bytes[at..<at + count]))
    }
}

extension Collection<UInt8> {
    /// The first elements that are as said, at most so many.
    fileprivate func prefix(_ most: Int, while isWanted: (UInt8) -> Bool) -> [UInt8] { Array(prefix(most).prefix(while: isWanted)) }
}
