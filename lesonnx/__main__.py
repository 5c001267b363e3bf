"""``python -m lesonnx``: the same command."""

from lesonnx.cli import main

if __name__ == "__main__":
    main()
