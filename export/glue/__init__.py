"""``lesonnx glue``: what varies with a bundle, as source code for a phone app.

bundle -> `spec` (what there is to say) -> `outputters` (one language each, by a template) -> `render` (files).
"""
