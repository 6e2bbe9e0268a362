"""Panels for JupyterLab, each a thin skin on the engine: not here yet."""
