"""Bytes of LLM APIs to typed facts and back. Pure: no clock, no socket; parsers are fed and never read."""
