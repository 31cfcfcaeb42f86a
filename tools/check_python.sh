# Sourced by tools/check: what the Python package and its tests take from PyPI, in a folder of their own.

# python_tools: sets python_option for `meson setup`. Without PyPI the package is left out, and its test is skipped.
python_tools() {
    venv=$PWD/build-python
    python_option=-Dinterpreter=$venv/bin/python
    if [ -x "$venv/bin/pytest" ] && [ -x "$venv/bin/mypy" ]; then return 0; fi
    if python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet "nanobind>=2.0" pytest mypy perfetto; then return 0; fi
    echo "skipped: the Python package: no nanobind, pytest, mypy and perfetto from PyPI"
    # shellcheck disable=SC2034 # tools/check reads it
    python_option=-Dpython=disabled
}
