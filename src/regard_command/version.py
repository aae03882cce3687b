"""The version of this release; a test holds pyproject.toml to it."""

__version__ = "0.1.0"
