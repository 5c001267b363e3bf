import Foundation
import Testing

@testable import LesonnxScheduler

/// The record of what sees pictures in the manifest: what is read and refused.
@Suite struct VisionManifestTests {
    private static func value(_ name: String, _ dtype: String, _ shape: String) -> String {
        "{\"name\": \"\(name)\", \"dtype\": \"\(dtype)\", \"shape\": \(shape)}"
    }

    private static func part(_ role: String, _ inputs: [String], _ outputs: [String]) -> String {
        """
        {"name": "\(role)", "role": "\(role)", "path": "vision/\(role).onnx", "layer_idx": null,
         "inputs": [\(inputs.joined(separator: ", "))], "outputs": [\(outputs.joined(separator: ", "))]}
        """
    }

    private static let pixels = value("pixel_values", "float32", "[1, 3, 14, \"W\"]")
    private static let prepare = part(
        "vision_prepare",
        [value("image", "uint8", "[\"Y\", \"X\", 3]"), value("size", "int64", "[2]"), value("grid", "int64", "[2]")], [pixels])
    private static let tower = part(
        "vision_tower", [pixels, value("target_size", "int64", "[2]")], [value("image_features", "float32", "[\"I\", 32]")])

    static let manifest: String = {
        let residual = "{\"name\": \"residual\", \"dtype\": \"float32\", \"shape\": [1, \"T\", 32]}"
        let segment = SmallBundle.part("segment_000", "segment", "0")
        let positions = value("position_ids", "int64", "[3, 1, \"T\"]")
        let vision = """
            "vision": {"kind": "minicpmv", "parts": [\(prepare), \(tower)], "data": "vision/vision.bin", "patch_size": 14,
             "token_patches": 4, "scale_resolution": 448, "max_slice_nums": 9, "tokens": {"image": 1, "image_start": 2,
              "image_end": 3, "slice_start": 4, "slice_end": 5, "newline": 6},
             "texts": {"placeholder": "<|image_pad|>", "image_start": "<image>", "image_end": "</image>", "slice_start": "<slice>",
              "slice_end": "</slice>", "row_end": "\\n", "id_start": "<image_id>", "id_end": "</image_id>", "separator": null},
             "num_parameters": 12, "working_bytes": 34}, "skipped_tensors":
            """
        return SmallBundle.manifest
            .replacing(segment, with: segment.replacing(residual, with: "\(residual), \(positions)"))
            .replacing("\"skipped_tensors\":", with: vision)
    }()

    @Test func whatItSays() throws {
        let manifest = try SmallBundle.parse(Self.manifest)
        let vision = try need(manifest.vision, "vision")
        #expect(manifest.positionRows == 3 && vision.kind == .minicpmv && vision.patchSize == 14 && vision.tokenPatches == 4)
        #expect(vision.scaleResolution == 448 && vision.maxSliceNums == 9 && vision.data == "vision/vision.bin")
        #expect(vision.tokens.byName.map(\.id) == [1, 2, 3, 4, 5, 6] && vision.texts.rowEnd == "\n")
        #expect(vision.texts.idEnd == "</image_id>" && vision.texts.separator == nil && vision.maxCropTokens == 128)
        #expect(vision.numParameters == 12 && vision.workingBytes == 34)
        #expect(VisionRecord.roles.map { vision.part($0)?.path } == ["vision/vision_prepare.onnx", "vision/vision_tower.onnx"])
        let plain = try SmallBundle.parse()
        #expect(plain.vision == nil && plain.positionRows == 1)
    }

    /// How pictures stand in a chat, and before a text that has no placeholder.
    @Test func messages() throws {
        let text = Self.manifest.replacing("\"separator\": null", with: "\"separator\": \"; \"")
        let chats = try need(SmallBundle.parse(text).vision, "vision")
        let silent = try need(SmallBundle.parse(Self.manifest).vision, "vision")
        #expect(try chats.message("What?", numPictures: 2) == "<|image_pad|>; <|image_pad|>; What?")
        #expect(try silent.message("What?", numPictures: 0) == "What?")
        #expect(throws: LesonnxError.input("this bundle does not say how pictures stand in a chat; use generate")) {
            try silent.message("What?", numPictures: 1)
        }
        #expect(silent.withPlaceholders("What?", numPictures: 1) == "<|image_pad|>\nWhat?")
        #expect(chats.withPlaceholders("", numPictures: 2) == "<|image_pad|>; <|image_pad|>; ")
        #expect(chats.withPlaceholders("A <|image_pad|>!", numPictures: 2) == "A <|image_pad|>!")
    }

    @Test func filesThatAreMissing() throws {
        try withFolder { folder in
            let bundle = folder.appending(path: "bundle")
            try SmallBundle.write(to: bundle)
            try Data(Self.manifest.utf8).write(to: bundle.appending(path: "manifest.json"))
            try FileManager.default.createDirectory(at: bundle.appending(path: "vision"), withIntermediateDirectories: true)
            for path in ["vision/vision_prepare.onnx", "vision/vision_tower.onnx", "vision/vision.bin"] {
                let missing = bundle.appending(path: path).path(percentEncoded: false)
                #expect(throws: LesonnxError.bundle("\(missing): missing from the bundle")) { try ModelBundle(directory: bundle) }
                try Data([7]).write(to: bundle.appending(path: path))
            }
            #expect(try ModelBundle(directory: bundle).manifest.vision != nil)
        }
    }

    /// What is replaced, by what, and what the error says.
    static let bad: [(String, String, String)] = [
        ("\"kind\": \"minicpmv\"", "\"kind\": \"qwen3_vl\"", "vision.kind: expected one of minicpmv, found 'qwen3_vl'"),
        ("\"patch_size\": 14", "\"patch_size\": 0", "vision.patch_size: expected a whole number from 1 to 1024"),
        ("\"token_patches\": 4", "\"token_patches\": 3", "vision.token_patches: expected one of 2, 4, found 3"),
        ("\"scale_resolution\": 448", "\"scale_resolution\": 8193", "vision.scale_resolution: expected a whole number from 1 to 8192"),
        ("\"max_slice_nums\": 9", "\"max_slice_nums\": 257", "vision.max_slice_nums: expected a whole number from 1 to 256"),
        ("\"working_bytes\": 34", "\"working_bytes\": 34, \"more\": 1", "vision.more: unknown key"),
        ("\"newline\": 6", "\"newline\": 100", "vision: tokens.newline is 100, expected less than 100"),
        ("\"newline\": 6", "\"newline\": 6, \"tab\": 7", "vision.tokens.tab: unknown key"),
        ("\"<|image_pad|>\"", "\"\"", "vision.texts.placeholder: expected a text, found ''"),
        ("\"id_end\": \"</image_id>\"", "\"id_end\": null", "vision: texts has one of id_start and id_end, expected both or none"),
        ("\"vision/vision.bin\"", "\"../vision.bin\"", "vision.data: expected a relative path"),
        ("[3, 1, \"T\"]", "[1, \"T\"]", "vision: the model's parts take position_ids [1, T], expected [3, 1, T]"),
        ("[3, 1, \"T\"]", "[2, 1, \"T\"]", "parts: part 'segment_000' takes position_ids [2, 1, 'T'], expected [3, 1, 'T']"),
        ("\"role\": \"vision_tower\"", "\"role\": \"vision_prepare\"",
            "vision has exactly one part of each role: vision_prepare, vision_tower"),
        ("\"role\": \"lookahead\"", "\"role\": \"vision_tower\"", "vision's parts belong into vision.parts"),
        ("[\"I\", 32]", "[\"I\", 33]",
            "part 'vision_tower' gives image_features float32 ['I', 33], expected image_features float32 ['I', 32]"),
        ("\"uint8\", \"shape\": [\"Y\", \"X\", 3]", "\"uint8\", \"shape\": [\"Y\", \"X\", 4]", "part 'vision_prepare' takes grid int64 [2], image uint8 ['Y', 'X', 4]"),
    ]

    @Test(arguments: bad.indices) func badRecords(_ number: Int) throws {
        let (old, new, message) = Self.bad[number]
        let range = try need(Self.manifest.firstRange(of: old), old)
        do {
            _ = try SmallBundle.parse(Self.manifest.replacingCharacters(in: range, with: new))
            Issue.record("\(new) was taken")
        } catch LesonnxError.bundle(let found) {
            #expect(found.hasPrefix("here/manifest.json: ") && found.contains(message) && !found.contains("\n"), "\(found)")
        }
    }
}
