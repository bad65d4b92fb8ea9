"""The small model of `kvflow demo`: a Hugging Face directory with its script and provenance."""

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).parent

# Openings of texts. The model's greedy continuations are readable, and all different.
DEMO_PROMPTS = (
    "The assert statement",
    "A class definition",
    "The with statement is used to",
    "An exception is raised when",
    "Dictionaries are",
    "The for loop",
    "The del statement",
    "Exceptions are",
    "A module",
    "The operator",
    "Numbers are created by",
    "Attribute access can be customized by",
    "The return statement",
    "A decorator is",
    "The try statement specifies",
    "Names refer to objects.",
    "Lists are created",
    "Calling a method",
    "The global statement",
    "The format string",
    "Coroutine objects are",
    "A slice object",
    "Comparison operators",
    "Boolean operations",
)
