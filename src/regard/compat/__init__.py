"""Guests: other libraries, met on their own terms. Each module here is imported by who wants it, never by regard."""
