"""Serving: trained rankers behind HTTP, with prefixes of histories computed ahead."""
