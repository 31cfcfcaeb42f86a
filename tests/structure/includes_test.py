"""Tests of includes.py: a sound tree passes, and each broken rule fails with its place."""
import sys

from counts import run_unittest
from tree import TreeTest

FOLDERS = """# a small house
floor kernels:
floor planner:
floor simulator: planner
floor engine: planner kernels
floor tools: planner kernels simulator engine
planner/base
planner/plan
simulator/cost
engine/run
tools
"""
LISTED = FOLDERS.split("kernels simulator engine\n", 1)[1].split()
DOCUMENT = "## Include order of folders\n\n" + "".join(f"| `{folder}` | holds |\n" for folder in LISTED) + "\n## Next\n\n| `x` |\n"
FILES = {
    "planner/base/error.hpp": "#pragma once\n",
    "planner/plan/plan.cpp": '#include "planner/base/error.hpp"\n#include <vector>\n',
    "planner/plan/plan.hpp": '// #include "simulator/cost/cost.hpp" is no include\n',
    "simulator/cost/cost.cpp": '#include "planner/plan/plan.hpp"\n',
    "simulator/cost/cost.hpp": "#pragma once\n",
    "engine/run/run.cpp": '#include "kernels/kernels.hpp"\n#include "planner/plan/plan.hpp"\n',
    "kernels/kernels.hpp": "#pragma once\n",
    "kernels/cpu/gemm.cpp": '#include "kernels/kernels.hpp"\n',
    "tools/main.cpp": '#include "engine/run/run.hpp"\n#include "simulator/cost/cost.hpp"\n',
    "engine/run/run.hpp": "#pragma once\n",
    "planner/meson.build": "subdir('base')\nsubdir('plan')\n",
    "tests/support/draws.hpp": "#pragma once\n",
}


class Includes(TreeTest):
    def setUp(self):
        super().setUp()
        self.write("tests/structure/folders.txt", FOLDERS)
        self.write("docs/architecture.md", DOCUMENT)
        for path, text in FILES.items():
            self.write(path, text)
        for folder in LISTED:
            self.write(f"{folder}/README.md", "# A folder\n")
            if folder != "planner/base":  # which holds headers alone
                self.write(f"{folder}/meson.build", "")

    def test_sound_tree_passes(self):
        self.passes("includes.py", self.root)

    def test_upward_include_within_a_floor(self):
        self.write("planner/base/error.hpp", '#pragma once\n  #  include "planner/plan/plan.hpp"\n')
        self.fails("planner/base/error.hpp:2: upward include: planner/plan", "includes.py", self.root)

    def test_planner_includes_no_other_floor(self):
        for included in ("simulator/cost/cost.hpp", "engine/run/run.hpp", "kernels/kernels.hpp"):
            self.write("planner/plan/plan.cpp", f'#include "{included}"\n')
            self.fails("planner/plan/plan.cpp:1: planner/ may not include", "includes.py", self.root)

    def test_simulator_and_engine_do_not_meet(self):
        self.write("simulator/cost/cost.cpp", '#include "engine/run/run.hpp"\n')
        self.fails("simulator/ may not include engine/", "includes.py", self.root)
        self.write("simulator/cost/cost.cpp", '#include "kernels/kernels.hpp"\n')
        self.fails("simulator/ may not include kernels/", "includes.py", self.root)
        self.write("simulator/cost/cost.cpp", "")
        self.write("engine/run/run.cpp", '#include "simulator/cost/cost.hpp"\n')
        self.fails("engine/ may not include simulator/", "includes.py", self.root)

    def test_kernels_include_kernels_alone(self):
        self.write("kernels/cuda/products/gemm.cu", '#include "planner/plan/plan.hpp"\n')
        self.fails("kernels/cuda/products/gemm.cu:1: kernels/ may not include planner/", "includes.py", self.root)

    def test_nothing_includes_a_test(self):
        self.write("tools/main.cpp", '#include "tests/support/draws.hpp"\n')
        self.fails("tools/main.cpp:1: tests/support/draws.hpp is a test", "includes.py", self.root)

    def test_included_file_is_missing(self):
        self.write("tools/main.cpp", '#include "planner/plan/moved.hpp"\n')
        self.fails("planner/plan/moved.hpp does not exist", "includes.py", self.root)

    def test_another_parser(self):
        for call in ("Json::parse(text)", "nlohmann::json::parse(text)", "std::stoi(word)", "atof(word)"):
            self.write("planner/plan/plan.cpp", f"auto x = {call};\n")
            self.fails("planner/plan/plan.cpp:1: ", "includes.py", self.root)
        self.write("planner/plan/plan.cpp", "auto x = JsonObject::parse(text, place); // not Json::parse(text)\n")
        self.write("planner/base/json.cpp", "auto x = Json::parse(text);\n")
        self.write("planner/base/meson.build", "")
        self.passes("includes.py", self.root)

    def test_folder_is_not_listed(self):
        self.write("planner/extra/new.cpp", "")
        self.fails("planner/extra:1: holds sources and is not in the list", "includes.py", self.root)

    def test_listed_folder_is_missing(self):
        self.write("tests/structure/folders.txt", FOLDERS + "tools/gone\n")
        self.write("docs/architecture.md", DOCUMENT.replace("| `tools` | holds |\n", "| `tools` | holds |\n| `tools/gone` | |\n"))
        self.fails("tools/gone:1: is in the list of folders and does not exist", "includes.py", self.root)

    def test_no_readme(self):
        (self.root / "simulator/cost/README.md").unlink()
        self.fails("simulator/cost/README.md:1: does not exist", "includes.py", self.root)

    def test_no_list_of_sources(self):
        (self.root / "engine/run/meson.build").unlink()
        self.fails("engine/run/meson.build:1: does not exist, but the folder holds run.cpp", "includes.py", self.root)

    def test_meson_has_another_order(self):
        self.write("planner/meson.build", "subdir('plan')\nsubdir('base')\n")
        self.fails("planner/meson.build:2: base comes earlier", "includes.py", self.root)

    def test_document_has_another_order(self):
        self.write("docs/architecture.md", DOCUMENT.replace("planner/plan", "planner/other"))
        self.fails("row 2 of the include order says planner/other, the list says planner/plan", "includes.py", self.root)
        self.write("docs/architecture.md", DOCUMENT.replace("| `tools` | holds |\n", ""))
        self.fails("row 5 of the include order says nothing, the list says tools", "includes.py", self.root)

    def test_no_sources_at_all(self):
        self.write("tests/structure/folders.txt", "floor nowhere:\n")
        self.fails("no sources on any floor", "includes.py", self.root)


if __name__ == "__main__":
    sys.exit(run_unittest("includes_test"))
