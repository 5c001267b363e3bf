"""The embedded sample: a small trained checkpoint, as package data."""
