"""Tests of prose.py: what it counts, what it leaves out, and that each fault fails with its place."""
import sys

from counts import run_unittest
from tree import TreeTest

LONG = "word " * 40 + "last"


class Prose(TreeTest):
    def test_sound_document_passes(self):
        self.write("docs/guide/a.md", "# A guide\n\nSee [b](b.md#the-second-part) and [web](https://example.org/none).\n")
        self.write("docs/guide/b.md", "# B\n\n## The second part\n\nText, e.g. this one. It ends here.\n")
        self.passes("prose.py", self.root)

    def test_long_sentence_over_several_lines(self):
        self.write("README.md", "# T\n\nA short one. " + "word " * 20 + "\n" + "word " * 21 + ".\n")
        self.fails("README.md:3: a sentence of 41 words", "prose.py", self.root)

    def test_forty_words_are_no_fault(self):
        self.write("README.md", "word " * 28 + "\n" + "word " * 12 + ". Another sentence follows.\n")
        self.passes("prose.py", self.root)

    def test_long_list_item_and_heading(self):
        self.write("planner/README.md", "- short\n- " + "w " * 41 + "\n")
        self.fails("planner/README.md:2: a sentence of 41 words", "prose.py", self.root)
        self.write("planner/README.md", "# " + "w " * 41 + "\n")
        self.fails("planner/README.md:1: a sentence of 41 words", "prose.py", self.root)

    def test_list_items_are_sentences_of_their_own(self):
        self.write("README.md", "A list:\n" + "".join(f"- item {i} without a full stop\n" for i in range(20)))
        self.passes("prose.py", self.root)

    def test_an_abbreviation_ends_no_sentence(self):
        self.write("README.md", "word " * 20 + "e.g. " + "word\n" * 21)
        self.fails("README.md:1: a sentence of 42 words", "prose.py", self.root)

    def test_a_code_span_is_one_word_and_a_link_its_text(self):
        self.write("README.md", "See `" + "a. " * 30 + "a` and\n[x](README.md) " + "w " * 36 + "\n")
        self.passes("prose.py", self.root)
        self.write("README.md", "See `" + "a. " * 30 + "a` and\n[x](README.md) " + "w " * 37 + "\n")
        self.fails("README.md:1: a sentence of 41 words", "prose.py", self.root)

    def test_tables_and_code_are_left_out(self):
        self.write("README.md", "Before.\n\n| " + LONG + " |\n|---|\n\n```\n" + LONG + "\n```\n\nThen:\n\n    " + LONG + "\n")
        self.passes("prose.py", self.root)

    def test_text_behind_code_counts_again(self):
        self.write("README.md", "```\ncode\n```\n" + LONG.replace(" ", "\n") + "\n")
        self.fails("README.md:4: a sentence of 41 words", "prose.py", self.root)
        self.write("README.md", "- item\n\n    " + LONG + "\n")
        self.fails("README.md:3: a sentence of 41 words", "prose.py", self.root)

    def test_long_line(self):
        self.write("CONTRIBUTING.md", "# T\n\n" + "x" * 140 + "\n" + "y" * 141 + "\n")
        self.fails("CONTRIBUTING.md:4: a line of 141 characters", "prose.py", self.root)

    def test_a_notebook_is_not_held_to_lengths_but_to_links(self):
        self.write("docs/notes/tried.md", LONG * 4 + "\n")
        self.passes("prose.py", self.root)
        self.write("docs/notes/tried.md", "See [this](gone.md).\n")
        self.fails("docs/notes/tried.md:1: a link to gone.md, which does not exist", "prose.py", self.root)

    def test_broken_links(self):
        self.write("docs/glossary.md", "# G\n\n| [t](../missing/) |\n")
        self.fails("docs/glossary.md:3: a link to ../missing/", "prose.py", self.root)
        self.write("docs/glossary.md", "# G\n\nSee [g](#nowhere).\n")
        self.fails("docs/glossary.md:3: a link to #nowhere, which has no such heading", "prose.py", self.root)
        self.write("docs/glossary.md", "# G\n\n[g]: gone.md\n")
        self.fails("docs/glossary.md:3: a link to gone.md", "prose.py", self.root)
        self.write("docs/glossary.md", "# G\n\nSee [g](/docs/glossary.md).\n")
        self.fails("docs/glossary.md:3: a link to /docs/glossary.md", "prose.py", self.root)

    def test_links_in_code_are_no_links(self):
        self.write("docs/glossary.md", "# G\n\n`[a](gone.md)`\n\n    [b](gone.md)\n")
        self.passes("prose.py", self.root)

    def test_a_file_that_is_gone(self):
        self.write("docs/notes/tried.md", "`planner/plan.hpp`, `planner/*.hpp`, `tools/check` and `build/tools/x.y`\n")
        self.fails("docs/notes/tried.md:1: names planner/plan.hpp, which does not exist", "prose.py", self.root)
        self.write("planner/plan.hpp", "")
        self.passes("prose.py", self.root)

    def test_builds_are_left_out_and_profiles_are_not(self):
        self.write("README.md", "# T\n")
        self.write("build-x/README.md", LONG + "\n")
        self.passes("prose.py", self.root)
        self.write("profiles/runs/README.md", LONG.replace(" ", "\n") + "\n")
        self.fails("profiles/runs/README.md:1: a sentence of 41 words", "prose.py", self.root)

    def test_no_documents_at_all(self):
        self.fails("no documents", "prose.py", self.root)


if __name__ == "__main__":
    sys.exit(run_unittest("prose_test"))
