"""lesonnx: run Mixture-of-Experts language models larger than memory on ONNX Runtime."""

__version__ = "0.1.0"
