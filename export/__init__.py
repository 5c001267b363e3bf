"""The lesonnx exporter: from a Hugging Face checkpoint to a bundle. Installs as ``lesonnx_export``."""
