"""Speculative decoding: drafters, what a draft costs, and how it is verified. It knows no files of the target."""
