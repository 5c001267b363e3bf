import Foundation

@testable import LesonnxScheduler

/// A bundle of two MoE layers as text and files: whole as far as opening looks, without anything that could run.
enum SmallBundle {
    static func matrix(_ rows: Int, _ columns: Int, weight: Int, scales: Int) -> String {
        """
        {"rows": \(rows), "columns": \(columns), "bits": 4, "block_size": 16, "weight_offset_bytes": \(weight),
         "scales_offset_bytes": \(scales), "bias_offset_bytes": null}
        """
    }

    /// hidden 32, intermediate 16: 256 bytes a weight, 128 bytes of scales each.
    static let kind = """
        {"name": "stage_0", "hidden_size": 32, "intermediate_size": 16, "activation": "swiglu", "alpha": 1.702, "limit": 7,
         "gate_proj": \(matrix(16, 32, weight: 0, scales: 768)), "up_proj": \(matrix(16, 32, weight: 256, scales: 896)),
         "down_proj": \(matrix(32, 16, weight: 512, scales: 1024)), "length_bytes": 1152, "stage": "experts/stage_0.onnx"}
        """

    static func part(_ name: String, _ role: String, _ layer: String) -> String {
        """
        {"name": "\(name)", "role": "\(role)", "path": "dense/\(name).onnx", "layer_idx": \(layer),
         "inputs": [{"name": "residual", "dtype": "float32", "shape": [1, "T", 32]}], "outputs": [],
         "providers": {"ios": [{"name": "CPUExecutionProvider", "options": {"a": "b"}}]}}
        """
    }

    static let manifest = """
        {"format_version": 1, "producer": "lesonnx 0.1.0", "onnxruntime_at_least": "1.24",
         "model": {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100, "num_experts": 4,
          "num_experts_per_tok": 2, "moe_intermediate_size": 16, "max_position_embeddings": 512, "num_parameters": 1000,
          "num_active_parameters": 600, "eos_token_ids": [0], "bos_token_id": null, "pad_token_id": 0},
         "quantization": {"expert_bits": 4, "dense_bits": 8, "kv_bits": 32, "block_size": 16},
         "prefill_chunk_tokens": 128,
         "parts": [\(part("embed", "embed", "null")), \(part("segment_000", "segment", "0")),
          \(part("segment_001", "segment", "1")), \(part("lookahead_001", "lookahead", "1")), \(part("head", "head", "null"))],
         "states": [{"name": "key_0", "kind": "attention_key", "layer_idx": 0, "part": "segment_000", "input": "past_key_0",
          "output": "present_key_0", "dtype": "float32", "shape": [1, 2, "S", 16]}],
         "expert_kinds": [\(kind)],
         "expert_layers": [
          {"layer_idx": 0, "pack": "experts/layer_000/experts.pack", "num_experts": 4, "num_experts_per_tok": 2, "kind": 0,
           "shared_kind": null},
          {"layer_idx": 1, "pack": "experts/layer_001/experts.pack", "num_experts": 4, "num_experts_per_tok": 2, "kind": 0,
           "shared_kind": 0}],
         "tokenizer": {"json_path": "tokenizer/tokenizer.json", "onnx": null, "config": null, "chat_template": null,
          "chat_format": {"start": "<s>", "messages": {"user": {"prefix": "U:", "suffix": "\\n"},
           "assistant": {"prefix": "A:", "suffix": "</s>"}}, "answer": "A:"}},
         "skipped_tensors": {"mtp.w": "no drafter"}}
        """

    static func parse(_ text: String = manifest) throws -> BundleManifest {
        try BundleManifest(parsing: Array(text.utf8), source: "here/manifest.json")
    }

    /// Writes the bundle into a folder that is not there yet.
    static func write(to folder: URL) throws {
        func put(_ path: String, _ data: Data) throws {
            let file = folder.appending(path: path)
            try FileManager.default.createDirectory(at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
            try data.write(to: file)
        }
        try put("manifest.json", Data(manifest.utf8))
        for name in ["embed", "segment_000", "segment_001", "lookahead_001", "head"] {
            try put("dense/\(name).onnx", Data([1, 2, 3]))
        }
        try put("experts/stage_0.onnx", Data([4]))
        for (layer, experts) in [(0, 4), (1, 5)] {
            try put("experts/layer_00\(layer)/experts.pack", Data(count: experts * pageBytes))
            for expert in 0..<4 {
                try put("experts/layer_00\(layer)/expert_00\(expert).onnx", Data([5]))
            }
        }
        try put("experts/layer_001/shared.onnx", Data([6]))
    }
}

/// A folder of a test's own; gone when the test is done.
func withFolder<Result>(_ body: (URL) throws -> Result) throws -> Result {
    let folder = FileManager.default.temporaryDirectory.appending(path: "lesonnx-\(UUID().uuidString)")
    try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
    defer { try? FileManager.default.removeItem(at: folder) }
    return try body(folder)
}
