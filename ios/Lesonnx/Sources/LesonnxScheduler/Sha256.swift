#if canImport(CryptoKit)
import CryptoKit

/// SHA-256 of bytes that come piece by piece; the system's own, which uses the processor's instructions.
public struct Sha256 {
    private var inner = CryptoKit.SHA256()

    public init() {}

    public mutating func update(_ bytes: UnsafeRawBufferPointer) {
        inner.update(bufferPointer: bytes)
    }

    /// The digest in hexadecimal letters.
    public func finish() -> String {
        inner.finalize().map { hexadecimal($0) }.joined()
    }
}
#else
/// SHA-256 (FIPS 180-4) of bytes that come piece by piece, for systems without a library of their own.
public struct Sha256 {
    private static let constants: [UInt32] = [
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
        0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
        0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
        0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
        0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
        0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    ]

    private var state: [UInt32] = [
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    ]
    private var schedule = [UInt32](repeating: 0, count: 64)
    private var pending: [UInt8] = []
    private var length: UInt64 = 0

    public init() {}

    public mutating func update(_ bytes: UnsafeRawBufferPointer) {
        length += UInt64(bytes.count)
        var at = 0
        if !pending.isEmpty {
            at = min(64 - pending.count, bytes.count)
            pending += bytes[..<at]
            if pending.count < 64 {
                return
            }
            let block = pending
            block.withUnsafeBytes { take($0, at: 0) }
            pending.removeAll(keepingCapacity: true)
        }
        while bytes.count - at >= 64 {
            take(bytes, at: at)
            at += 64
        }
        pending += bytes[at...]
    }

    /// The digest in hexadecimal letters.
    public func finish() -> String {
        var copy = self
        var tail: [UInt8] = [0x80]
        tail += [UInt8](repeating: 0, count: (119 - Int(length % 64)) % 64)
        tail += (0..<8).map { UInt8(truncatingIfNeeded: (length << 3) >> (56 - 8 * UInt64($0))) }
        tail.withUnsafeBytes { copy.update($0) }
        let bytes = copy.state.flatMap { word in (0..<4).map { UInt8(truncatingIfNeeded: word >> (24 - 8 * UInt32($0))) } }
        return bytes.map { hexadecimal($0) }.joined()
    }

    private mutating func take(_ bytes: UnsafeRawBufferPointer, at start: Int) {
        Self.constants.withUnsafeBufferPointer { constants in
            schedule.withUnsafeMutableBufferPointer { w in
                for i in 0..<16 {
                    w[i] = UInt32(bigEndian: bytes.loadUnaligned(fromByteOffset: start + 4 * i, as: UInt32.self))
                }
                for i in 16..<64 {
                    let s0 = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ (w[i - 15] >> 3)
                    let s1 = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ (w[i - 2] >> 10)
                    w[i] = w[i - 16] &+ s0 &+ w[i - 7] &+ s1
                }
                var (a, b, c, d) = (state[0], state[1], state[2], state[3])
                var (e, f, g, h) = (state[4], state[5], state[6], state[7])
                for i in 0..<64 {
                    let s1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)
                    let choice = (e & f) ^ (~e & g)
                    let t1 = h &+ s1 &+ choice &+ constants[i] &+ w[i]
                    let s0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)
                    let majority = (a & b) ^ (a & c) ^ (b & c)
                    let t2 = s0 &+ majority
                    (h, g, f, e, d, c, b, a) = (g, f, e, d &+ t1, c, b, a, t1 &+ t2)
                }
                for (i, value) in [a, b, c, d, e, f, g, h].enumerated() {
                    state[i] = state[i] &+ value
                }
            }
        }
    }
}

@inline(__always)
private func rotated(_ word: UInt32, _ count: UInt32) -> UInt32 {
    (word &>> count) | (word &<< (32 - count))
}
#endif

private func hexadecimal(_ byte: UInt8) -> String {
    let text = String(byte, radix: 16)
    return byte < 16 ? "0" + text : text
}
