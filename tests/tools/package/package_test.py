"""tools/package over the build: what the .deb holds, that it is whole, and that the command in it finds its profiles."""
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ["SOURCE"])
sys.path.insert(0, str(SOURCE / "tests/structure"))
from counts import print_counts, run_unittest  # noqa: E402

MOST_BYTES = 20e6  # of the command without CUDA


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.out = pathlib.Path(cls.folder.name)
        subprocess.run([SOURCE / "tools/package", os.environ["BUILD"], cls.out], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "DPKG_DEB_COMPRESSOR_LEVEL": "1"})
        cls.package, = cls.out.glob("moe-plan_*.deb")
        cls.root = cls.out / "root"
        subprocess.run(["dpkg-deb", "--raw-extract", cls.package, cls.root], check=True)
        cls.command, = cls.root.rglob("bin/moe-plan")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_command(self, *words):
        environment = {key: value for key, value in os.environ.items() if key != "MOE_PLAN_PROFILES"}
        return subprocess.run([self.command, *words], capture_output=True, text=True, env=environment)

    def test_control_says_what_it_is(self):
        version = re.search(r"version: '(.*)'", (SOURCE / "meson.build").read_text())[1]
        fields = dict(line.split(": ", 1) for line in (self.root / "DEBIAN/control").read_text().splitlines() if line[0] != " ")
        self.assertEqual(self.package.name, f"moe-plan_{version}_{fields['Architecture']}.deb")
        self.assertEqual(self.run_command("--version").stdout.strip(), f"moe-plan {version}")
        self.assertEqual(fields["Version"], version)
        self.assertRegex(fields["Depends"], r"^libc6 \(>= 2\.\d+\)$")
        size = sum(file.stat().st_size for file in self.root.rglob("*") if file.is_file())
        self.assertAlmostEqual(int(fields["Installed-Size"]) * 1024 / size, 1.0, delta=0.1)

    def test_libc_is_all_that_the_command_needs(self):
        needed = subprocess.run(["objdump", "-p", self.command], check=True, capture_output=True, text=True).stdout
        libraries = set(re.findall(r"NEEDED\s+(\S+)", needed))
        self.assertLessEqual(libraries, {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"})

    def test_every_file_is_as_its_sum_says(self):
        sums = dict(reversed(line.split("  ", 1)) for line in (self.root / "DEBIAN/md5sums").read_text().splitlines())
        files = {str(file.relative_to(self.root)) for file in self.root.rglob("*") if file.is_file() and "DEBIAN" not in file.parts}
        self.assertEqual(set(sums), files)
        for name, digest in sums.items():
            self.assertEqual(hashlib.md5((self.root / name).read_bytes()).hexdigest(), digest, name)

    def test_it_has_pages_completions_and_all_profiles(self):
        share = self.command.parents[1] / "share"
        for name in ["man/man1/moe-plan.1.gz", "bash-completion/completions/moe-plan.bash", "zsh/site-functions/_moe-plan",
                     "fish/vendor_completions.d/moe-plan.fish", "doc/moe-plan/copyright", "doc/moe-plan/changelog.gz"]:
            self.assertGreater((share / name).stat().st_size, 100, name)
        profiles = {str(file.relative_to(SOURCE / "profiles")) for file in (SOURCE / "profiles").rglob("*") if file.is_file()}
        packed = share / "moe-plan/profiles"
        self.assertEqual({str(file.relative_to(packed)) for file in packed.rglob("*") if file.is_file()}, profiles)

    def test_the_command_is_small_and_finds_its_profiles(self):
        self.assertLess(self.command.stat().st_size, MOST_BYTES)
        self.assertIn("DeepSeek-V3\n", self.run_command("show", "models", "--quiet").stdout)
        moved = self.out / "moved"
        shutil.move(self.command.parents[1] / "share/moe-plan/profiles", moved)
        self.addCleanup(shutil.move, moved, self.command.parents[1] / "share/moe-plan/profiles")
        lost = self.run_command("show", "models")
        self.assertEqual(lost.returncode, 1)
        self.assertIn("cannot find the profiles folder", lost.stderr)

    def test_the_cuda_engine_is_a_package_of_its_own(self):
        self.assertEqual(list(self.root.rglob("*.so")), [])
        packages = list(self.out.glob("moe-plan-cuda_*.deb"))
        self.assertEqual(len(packages), 1 if os.environ["CUDA_BUILT"] else 0)
        without = self.run_command("generate", "--model", "none", "--prompt", "x", "--backend", "cuda")
        self.assertEqual(without.returncode, 2)
        self.assertIn("no CUDA engine at ", without.stderr)
        for package in packages:
            version = re.search(r"moe-plan_(.*)_", self.package.name)[1]
            depends = subprocess.run(["dpkg-deb", "--field", package, "Depends"], check=True, capture_output=True, text=True).stdout
            self.assertRegex(depends, rf"^moe-plan \(= {re.escape(version)}\), libc6 \(>= 2\.\d+\)$")
            subprocess.run(["dpkg-deb", "--extract", package, self.root], check=True)
            module, = self.root.rglob("moe-plan-cuda.so")
            self.addCleanup(module.unlink)
            found = self.run_command("generate", "--model", "none", "--prompt", "x", "--backend", "cuda")
            self.assertEqual(found.returncode, 2)
            self.assertNotIn("CUDA engine", found.stderr)

    def test_an_unknown_option_is_refused(self):
        self.assertEqual(subprocess.run([SOURCE / "tools/package", "--deb"], capture_output=True).returncode, 2)


if __name__ == "__main__":
    missing = [program for program in ("dpkg-deb", "objdump", "meson") if shutil.which(program) is None]
    if missing:
        print(f"skipped: tools/package: no {', '.join(missing)}")
        print_counts(0, 0, 1)
        sys.exit(77)
    sys.exit(run_unittest("__main__"))
