#!/usr/bin/env python3
"""Make models/corpus/passages.txt from the package descriptions of Debian 12.

    mkdir -p /tmp/lists/partial
    apt-get -o Dir::State::lists=/tmp/lists -o Acquire::Languages=en update
    python models/corpus/make.py /tmp/lists

Needs apt, `pip install tokenizers` and the model of models/fetch (to count
tokens). README.md says what the text is and under which terms it stands.
"""

import hashlib
import math
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PASSAGES = 4000

# Lengths in tokens follow a shifted exponential distribution, cut at TOKENS_MAX:
# mean 63 and 90th percentile 136 are those of the sentences that the encoder's
# first figures were taken on.
TOKENS_MIN = 10
TOKENS_SCALE = 57
TOKENS_MAX = 250

# Sections whose packages are things for people. Libraries describe each other.
SECTIONS = """admin comm database editors education electronics embedded games gnome graphics hamradio httpd
    interpreters kde mail math misc net news otherosfs science shells sound tex text utils vcs video web x11
    fonts devel""".split()

DULL = re.compile(r"(-data|-common|-doc|-dev|-dbg|-utils?|-plugins?|-extra|-locale.*|-l10n.*)$|^lib|offensive|dummy")
UNWANTED = re.compile(r"transitional|dummy|metapackage|meta-package|https?://|www\.|[*|@<>_=]|\b(sex|adult|porn|nude|drug|kill|gore)", re.I)
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|Dr|Mr|Mrs|St|No|Inc|Ltd|approx|[A-Z])\.$")


def main():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(HERE.parent / "all-MiniLM-L6-v2" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    count = lambda text: len(tokenizer.encode(text).ids)

    pool = {}
    for package, description in one_per_source(Path(sys.argv[1])).items():
        prefixes = ladder(split(description), count)
        if prefixes:
            pool[package] = prefixes
    # The order of hashes mixes the subjects, so that every prefix of the file is a fair sample.
    chosen = choose(dict(sorted(pool.items(), key=lambda item: draw(item[0]))))
    packages = sorted(chosen, key=lambda package: draw("order " + package))
    lines = [chosen[package] for package in packages]
    assert len(set(lines)) == len(lines)
    (HERE / "passages.txt").write_text("\n".join(lines) + "\n")
    (HERE / "packages.txt").write_text("\n".join(packages) + "\n")
    for name, part in [("all", lines), ("first 2000", lines[:2000])]:
        lengths = sorted(count(line) for line in part)
        print(f"{name}: {len(part)} passages, {sum(lengths)} tokens, mean {sum(lengths) / len(part):.1f}, "
              f"p50 {lengths[len(part) // 2]}, p90 {lengths[len(part) * 9 // 10]}, max {lengths[-1]}")


def draw(package):
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(package.encode()).digest()[:6], "big") / 2**48


def one_per_source(lists):
    """Package name -> description, one binary package for each source package."""
    names = {}
    for fields in stanzas(next(lists.glob("*bookworm_main_binary-*_Packages*"))):
        name = fields["Package"]
        if fields.get("Section") not in SECTIONS or DULL.search(name):
            continue
        source = fields.get("Source", name).split()[0]
        best = names.get(source)
        if best is None or (name != source, len(name), name) < (best != source, len(best), best):
            names[source] = name
    kept = set(names.values())
    translations = next(lists.glob("*bookworm_main_i18n_Translation-en*"))
    return {f["Package"]: f["Description-en"] for f in stanzas(translations) if f["Package"] in kept}


def stanzas(path):
    ran = subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", str(path)], capture_output=True, text=True, check=True)
    for block in ran.stdout.split("\n\n"):
        fields, key = {}, None
        for line in block.splitlines():
            if line.startswith(" "):
                fields[key] += "\n" + line
            else:
                key, _, value = line.partition(":")
                fields[key] = value.strip()
        if fields:
            yield fields


def ladder(sentences, count):
    """(tokens, text) of the first sentence, the first two, and so on."""
    steps = []
    for end in range(1, len(sentences) + 1):
        text = " ".join(sentences[:end])
        tokens = count(text)
        if tokens > TOKENS_MAX:
            break
        steps.append((tokens, text))
    return steps


def choose(pool):
    """One text per package, so that the lengths follow the distribution wanted.

    The longest lengths choose first: long descriptions are rare, and any of them
    has a short beginning.
    """
    chosen, seen = {}, set()
    for rank in reversed(range(PASSAGES)):
        quantile = (rank + 0.5) / PASSAGES
        goal = min(TOKENS_MAX, TOKENS_MIN - TOKENS_SCALE * math.log(1 - quantile))
        for package, steps in pool.items():
            tokens, text = min(steps, key=lambda step: abs(step[0] - goal))
            if abs(tokens - goal) <= 0.04 * goal + 1 and text not in seen:
                chosen[package] = text
                seen.add(text)
                del pool[package]
                break
        else:
            sys.exit(f"no description is about {goal:.0f} tokens long")
    return chosen


def split(description):
    """The prose of a description: its synopsis, then the sentences of its paragraphs."""
    synopsis, _, rest = description.partition("\n")
    if UNWANTED.search(synopsis) or len(synopsis.split()) < 3 or not synopsis.isascii():
        return []
    sentences = [synopsis[0].upper() + synopsis[1:].rstrip(".") + "."]
    for paragraph in rest.split("\n ."):
        # Two blanks begin a list or a listing.
        if re.search(r"^  |^ *[-*+]", paragraph, re.M):
            continue
        words = " ".join(paragraph.split())
        current = ""
        for piece in re.split(r"(?<=[.!?]) ", words):
            current = f"{current} {piece}".strip()
            if current.endswith((".", "!", "?")) and not ABBREVIATIONS.search(current):
                if UNWANTED.search(current) or not current.isascii() or current.startswith(("This package", "Homepage")):
                    return sentences
                sentences.append(current)
                current = ""
    return sentences


if __name__ == "__main__":
    main()
