"""The commands and programs of a page, as they are written."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# What a command begins with. Fences without one show output.
PROGRAMS = {"cargo", "curl", "docker", "for", "install", "make", "models/fetch", "pip", "sudo", "tar", "vramq", "vramq-gateway", "vramq-worker"}


class Page:
    """A page of the repository in Markdown."""

    def __init__(self, name):
        self.name = name
        self.fences = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / name).read_text(), re.M | re.S)

    def commands(self):
        """The lines that a shell gets, in their order, without comments."""
        found = []
        for language, text in self.fences:
            if language in ("", "sh"):
                lines = re.sub(r"\\\n\s*", "", text).splitlines()
                found += [re.sub(r"\s+# .*$", "", line) for line in lines if line.split(" ")[0] in PROGRAMS]
        return found

    def command(self, start):
        """The only command that begins like this."""
        [found] = [command for command in self.commands() if command.startswith(start)]
        return found

    def program(self, language):
        """The only program in this language."""
        [found] = [text for of, text in self.fences if of == language]
        return found
