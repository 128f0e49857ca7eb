"""Questions about the demo corpus with short answers from it, for Python 3.11 to 3.14."""

from __future__ import annotations

from typing import NamedTuple


class DemoQuestion(NamedTuple):
    """A question, its right answers, and the modules whose documents answer it.

    With two modules, the first leads to the second, which has the answer.
    """

    question: str
    answers: tuple[str, ...]
    modules: tuple[str, ...]


DEMO_QUESTIONS = (
    DemoQuestion("Which setting of the csv module is the character that separates fields?", ("delimiter",), ("csv",)),
    DemoQuestion(
        "Which function of the csv module sets an upper limit on parsed fields?", ("field_size_limit",), ("csv",)
    ),
    DemoQuestion(
        "Which argument of json.loads is a function that gets every decoded object as an ordered list of pairs?",
        ("object_pairs_hook",),
        ("json",),
    ),
    DemoQuestion("Which function of shutil deletes a whole directory tree?", ("rmtree", "shutil.rmtree"), ("shutil",)),
    DemoQuestion(
        "Which function of tempfile is unsafe and should not be used?", ("mktemp", "tempfile.mktemp"), ("tempfile",)
    ),
    DemoQuestion(
        "Which method of collections.Counter lists the n most common elements?", ("most_common",), ("collections",)
    ),
    DemoQuestion(
        "Which class in collections is a list-like container with fast appends and pops on either end?",
        ("deque",),
        ("collections",),
    ),
    DemoQuestion(
        "Which function of secrets returns a random URL-safe text string?",
        ("token_urlsafe", "secrets.token_urlsafe"),
        ("secrets",),
    ),
    DemoQuestion("In which encoding is the text that secrets.token_urlsafe returns?", ("Base64",), ("secrets",)),
    DemoQuestion(
        "Which class of the queue module retrieves the most recently added entries first?", ("LifoQueue",), ("queue",)
    ),
    DemoQuestion("In which order does queue.PriorityQueue retrieve open entries?", ("lowest first",), ("queue",)),
    DemoQuestion("What does the drive of a pathlib path hold?", ("drive prefix", "The drive prefix"), ("pathlib",)),
    DemoQuestion(
        "Which function of textwrap removes common leading whitespace from every line?", ("dedent",), ("textwrap",)
    ),
    DemoQuestion(
        "What happens to the cache of functools.lru_cache when maxsize is None?",
        ("the cache can grow without bound", "it can grow without bound"),
        ("functools",),
    ),
    DemoQuestion(
        "Which formatter of argparse adds default values to the help of arguments?",
        ("ArgumentDefaultsHelpFormatter",),
        ("argparse",),
    ),
    DemoQuestion("Which function of heapq transforms a list into a heap?", ("heapify",), ("heapq",)),
    DemoQuestion(
        "Which kind of copy inserts copies of the objects found in the original, recursively?",
        ("deep copy", "a deep copy"),
        ("copy",),
    ),
    DemoQuestion("To what does logging.FileHandler write formatted logging records?", ("disk files",), ("logging",)),
    DemoQuestion(
        "What does a dot match in a regular expression of Python's re module?",
        ("any character except a newline",),
        ("re",),
    ),
    DemoQuestion(
        "glob's wildcards follow another module. Which function of that module tests a file name including its case?",
        ("fnmatchcase", "fnmatch.fnmatchcase"),
        ("glob", "fnmatch"),
    ),
    DemoQuestion(
        "glob's wildcards are those of another module. What does [!seq] match in that module's patterns?",
        ("any char not in seq", "any character not in seq"),
        ("glob", "fnmatch"),
    ),
    DemoQuestion(
        "Path.home returns what os.path.expanduser returns. What does expanduser do if the user is unknown?",
        ("do nothing", "nothing"),
        ("pathlib", "os.path"),
    ),
    DemoQuestion(
        "date.fromtimestamp takes a number from time.time(). What does time.time() count seconds since?",
        ("the Epoch", "Epoch"),
        ("datetime", "time"),
    ),
)
