"""Use of trained models: scoring of files, export to ONNX, and the HTTP server."""
