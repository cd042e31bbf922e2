"""The version of this package; pyproject.toml names it too."""

__version__ = "0.1.0"
