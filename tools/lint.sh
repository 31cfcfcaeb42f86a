# Sourced by check: the format of every file, and clang-tidy over those that changed. POSIX shell.
# Both functions add to passed, failed and skipped, and what failed to the list `bad`.

# llvm_tool NAME: the program of release 14, empty where there is none. Other releases format and warn otherwise.
llvm_tool() {
    for name in "$1-14" "$1"; do
        if command -v "$name" >/dev/null && "$name" --version | grep -q 'version 14\.'; then
            echo "$name"
            return
        fi
    done
}

# Passes on each name once, of files that exist.
existing() {
    awk '!seen[$0]++' | while read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done
}

# Sources of this project, those included that git does not know yet.
sources() {
    git ls-files -co --exclude-standard -- '*.cpp' '*.hpp' '*.cu' '*.cuh' | grep -v '^third_party/' | existing
}

in_git() { command -v git >/dev/null && git rev-parse --git-dir >/dev/null 2>&1; }

check_format() {
    say "Formatting"
    tool=$(llvm_tool clang-format)
    if [ -z "$tool" ] || ! in_git; then
        echo "Skipped: it needs clang-format 14 and git."
        skipped=$((skipped + 1))
    elif sources | xargs "$tool" --dry-run -Werror; then
        echo "All files have the format of .clang-format."
        passed=$((passed + 1))
    else
        echo "Run: $tool -i FILE..." >&2
        failed=$((failed + 1))
        bad="$bad  formatting
"
    fi
}

# The .cpp files that clang-tidy reads, the latest changed first.
changed_sources() {
    base=HEAD
    if [ -n "${TIDY_BASE:-}" ]; then base=$(git merge-base "$TIDY_BASE" HEAD); fi
    {
        git diff --name-only "$base" -- '*.cpp'
        git ls-files -o --exclude-standard -- '*.cpp'
        if [ -z "${TIDY_BASE:-}" ]; then git log -n 200 --name-only --format= -- '*.cpp'; fi
    } | existing | if [ -n "${TIDY_BASE:-}" ]; then cat; else head -n "${TIDY_FILES:-20}"; fi
}

# check_tidy FOLDER: as many files at a time as there are processors. Files that the folder does not compile, such as
# those of CUDA, are left out.
check_tidy() {
    say "clang-tidy over changed files"
    tool=$(llvm_tool clang-tidy)
    if [ -z "$tool" ] || ! in_git || [ ! -f "$1/compile_commands.json" ]; then
        echo "Skipped: it needs clang-tidy 14, git and the compile commands of a build."
        skipped=$((skipped + 1))
        return
    fi
    if [ -n "${TIDY_BASE:-}" ] && ! git merge-base "$TIDY_BASE" HEAD >/dev/null; then
        echo "TIDY_BASE: $TIDY_BASE has no commit in common with HEAD." >&2
        failed=$((failed + 1))
        return
    fi
    reports=$1/tidy
    rm -rf "$reports"
    mkdir -p "$reports"
    changed_sources | while read -r file; do
        if grep -q "/$file\"" "$1/compile_commands.json"; then echo "$file"; fi
    done >"$reports/files"
    # Tests include a header that GCC found compiled (tests/pch). Each file leaves NUMBER.good, NUMBER.bad or NUMBER.left in
    # the folder. Clang 14 does not let lambdas capture structured bindings, which C++20 allows: where it says so is no
    # finding.
    # shellcheck disable=SC2016
    awk '{ print NR, $0 }' "$reports/files" | xargs -r -n 2 -P "$(nproc 2>/dev/null || echo 2)" sh -c '
        report=$4/$5
        if [ "$(date +%s)" -ge "$1" ]; then
            echo "$6" >"$report.left"
        elif "$2" --quiet -p "$3" "--extra-arg=-I$PWD/tests/pch" "$6" >"$report.log" 2>&1; then
            echo "$6" >"$report.good"
        elif grep " error: " "$report.log" >"$report.errors" && ! grep -qv "reference to local binding" "$report.errors"; then
            echo "$6" >"$report.good"
        else
            echo "$6" >"$report.bad"
        fi' \
        tidy "$(($(date +%s) + ${TIDY_SECONDS:-300}))" "$tool" "$1" "$reports"
    for report in "$reports"/*.bad; do
        [ -f "$report" ] || continue
        printf '%s:\n' "$(cat "$report")"
        bad="$bad  clang-tidy: $(cat "$report")
"
        grep -v ' warnings generated' "${report%.bad}.log" || true
    done
    good=$(find "$reports" -name '*.good' | wc -l) found=$(find "$reports" -name '*.bad' | wc -l)
    left=$(find "$reports" -name '*.left' | wc -l)
    echo "$good files without a finding, $found with findings, $left left for want of time."
    if [ "$left" -gt 0 ]; then sed 's/^/  left: /' "$reports"/*.left; fi
    passed=$((passed + good)) failed=$((failed + found)) skipped=$((skipped + left))
}
