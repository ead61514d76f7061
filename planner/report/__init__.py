"""Formats results: tables, CSV, JSON, sentences. With `command` the only room that prints."""
