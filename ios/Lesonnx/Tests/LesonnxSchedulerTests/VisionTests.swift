import Foundation
import Testing

@testable import LesonnxScheduler

/// Cutting, placeholders and positions, against the vectors that Python wrote.
@Suite struct VisionTests {
    private static func vectors() throws -> JSON { try readJSON(testData.appending(path: "vision.json")) }

    /// The records of the vectors' facts, by name: what plays no part in them is made up.
    private static func records(_ vectors: JSON) throws -> [String: VisionRecord] {
        var records: [String: VisionRecord] = [:]
        for entry in try need(vectors["facts"]?.object, "facts") {
            let rest: [(String, JSON)] = [
                ("kind", .string("minicpmv")), ("parts", .array([])), ("data", .string("vision/vision.bin")),
                ("num_parameters", .int(1)), ("working_bytes", .int(1)),
            ]
            let fields = try need(entry.value.object, entry.key) + rest.map { JSON.Entry(key: $0.0, value: $0.1) }
            records[entry.key] = try VisionRecord(Field(path: entry.key, value: .object(fields)))
        }
        return records
    }

    private static func sizes(_ json: JSON?) throws -> [[Int]] {
        try need(json?.array, "sizes").map { try need($0.array?.compactMap(\.int), "size") }
    }

    private static func views(_ sizes: [[Int]], _ vision: VisionRecord) throws -> [[PictureView]] {
        try sizes.map { try vision.views(height: $0[0], width: $0[1]) }
    }

    /// The result, or nil where it was refused in one line as bad input.
    private func refusable<Result>(_ body: () throws -> Result) throws -> Result? {
        do {
            return try body()
        } catch LesonnxError.input(let why) {
            #expect(!why.contains("\n") && !why.isEmpty)
            return nil
        }
    }

    @Test func cutting() throws {
        let vectors = try Self.vectors()
        let records = try Self.records(vectors)
        var count = 0
        for entry in try need(vectors["cutting"]?.array, "cutting") {
            let vision = try need(records[need(entry["facts"]?.string, "facts")], "record")
            let all = try need(entry["views"]?.array, "views")
            for (size, expected) in zip(try Self.sizes(entry["sizes"]), all) {
                let found = try refusable { try vision.views(height: size[0], width: size[1]) }
                let rows = found?.map { [$0.size.height, $0.size.width, $0.grid.height, $0.grid.width] }
                #expect(try rows == (expected == .null ? nil : Self.sizes(expected)), "\(size)")
                count += 1
            }
        }
        #expect(count > 1000)
    }

    @Test func expanding() throws {
        let vectors = try Self.vectors()
        let records = try Self.records(vectors)
        let entries = try need(vectors["expanding"]?.array, "expanding")
        for (number, entry) in entries.enumerated() {
            let vision = try need(records[need(entry["facts"]?.string, "facts")], "record")
            let text = try need(entry["text"]?.string, "text")
            let found = try refusable { try vision.expand(text, Self.views(Self.sizes(entry["pictures"]), vision)) }
            #expect((found == nil) == (entry["refused"]?.bool == true), "\(number)")
            // By code points: Swift takes other ones for equal too.
            let isEqual = found.map { Array($0.utf8) } == entry["expanded"]?.string.map { Array($0.utf8) }
            #expect(isEqual, "\(number)")
            #expect(vision.hasPlaceholder(text) == text.contains(vision.texts.placeholder))
        }
        #expect(entries.count > 5)
    }

    @Test func positions() throws {
        let vectors = try Self.vectors()
        let records = try Self.records(vectors)
        let entries = try need(vectors["positions"]?.array, "positions")
        for (number, entry) in entries.enumerated() {
            let vision = try need(records[need(entry["facts"]?.string, "facts")], "record")
            let found = try refusable {
                try vision.positions(entry.ints("token_ids"), Self.views(Self.sizes(entry["pictures"]), vision))
            }
            #expect((found == nil) == (entry["refused"]?.bool == true), "\(number)")
            if let found {
                let isEqual = try found == Self.sizes(entry["positions"])
                #expect(isEqual, "\(number)")
                #expect(try (found.joined().max() ?? -1) + 1 == entry.int("next"), "\(number)")
            }
        }
        #expect(entries.count > 5)
    }

    @Test func pixMaps() throws {
        func read(_ header: String, _ pixels: [UInt8]) throws -> Picture { try Picture(pixMap: Array(header.utf8) + pixels, name: "a.ppm") }
        let picture = try read("P6 # of two\n# pixels\n2 1\n255\n", [1, 2, 3, 4, 5, 6, 80, 54])
        #expect(picture.height == 1 && picture.width == 2 && picture.rgb == [1, 2, 3, 4, 5, 6])
        for (header, why) in [
            ("P5 2 1 255\n", "it begins otherwise"), ("P6\n2", "it has no height"), ("P6 2 1 # 255", "it has no greatest value"),
            ("P6 2 1 65535\n", "its greatest value is 65535, expected 255"), ("P6 2 1 255", "its pixels are missing"),
            ("P6 0 1 255\n", "it is 0 x 1 pixels"), ("P6 3 1 255\n", "3 x 1 pixels take 9 bytes, found 6"),
            ("P6 99999999999 1 255\n", "it has no width"), ("P6 -1 1 255\n", "it has no width"),
            ("P6 999999999 999999999 255\n", "999999999 x 999999999 pixels take 2999999994000000003 bytes, found 6"),
        ] {
            let pixels: [UInt8] = why.hasSuffix("missing") ? [] : [1, 2, 3, 4, 5, 6]
            #expect(throws: LesonnxError.input("a.ppm: not a binary PPM (P6): \(why)")) { try read(header, pixels) }
        }
    }

    @Test func aPicture() throws {
        let picture = try Picture(height: 1, width: 2, rgb: [1, 2, 3, 4, 5, 6])
        let upright = try Picture(height: 2, width: 1, rgb: [1, 2, 3, 4, 5, 6])
        #expect(try picture == Picture(height: 1, width: 2, rgb: [1, 2, 3, 4, 5, 6]))
        #expect(try picture != upright && picture != Picture(height: 1, width: 2, rgb: [1, 2, 3, 4, 5, 7]))
        for (height, width, count) in [(1, 2, 5), (0, 2, 0), (-1, -2, 6), (.max, .max, 6)] {
            #expect(throws: LesonnxError.self) { try Picture(height: height, width: width, rgb: Array(repeating: 0, count: count)) }
        }
    }
}
