# Sourced by check: what its option --fast does. POSIX shell.
# A stamp in build-fast/passed says when a suite that passed had begun; `first` stands for the tests of changed folders.

stamps=build-fast/passed

# newer STAMP FILE...: whether a file has changed since the stamp was made, or there is no stamp.
newer() {
    stamp=$1
    shift
    [ ! -f "$stamp" ] || [ -n "$(find "$@" -newer "$stamp" 2>/dev/null)" ]
}

# Files beside sources and documents: profiles, expected figures, scripts. Any of them may decide a test.
data_files() {
    git ls-files -co --exclude-standard -- profiles docs tests tools 2>/dev/null |
        grep -Ev '\.(cpp|hpp|cu|cuh|md)$|meson\.build$' || true
}

stamp_of() { echo "$stamps/$(echo "$1" | tr ' ' '-')"; }

# The programs that decide a suite. None for those that are quick or say themselves that they are skipped.
programs_of() {
    case "$1" in
    planner | simulator | engine) echo "build-fast/tests/$1_test" ;;
    kernels) echo "build-fast/tests/kernels/kernels_test" ;;
    "engine allocations") echo "build-fast/tests/engine/allocation_test" ;;
    tools | "tools execute") echo "build-fast/tests/tools_test build-fast/tools/moe-plan" ;;
    esac
}

# Folders of tests that mirror the folders of sources changed since the stamp `first`, one on each line. A folder
# without tests of its own stands for the one around it.
changed_folders() {
    [ -f "$stamps/first" ] || return 0
    sources | grep '^\(tests/\)\{0,1\}\(planner\|simulator\|engine\)/.*\.[ch]pp$' | while read -r file; do
        if newer "$stamps/first" "$file"; then dirname "$file"; fi
    done | sed 's|^tests/||' | sort -u | while read -r folder; do
        while [ ! -d "tests/$folder" ]; do folder=$(dirname "$folder"); done
        case "$folder" in */*) echo "$folder" ;; esac # a whole area is a suite
    done | sort -u
}

# Runs the tests of changed folders, each for at most a minute: they only bring bad news sooner, the suites hold them
# too. Returns 1 where one failed.
run_changed_folders() {
    outcome=0
    for folder in $(changed_folders); do
        area=${folder%%/*}
        status=0
        run timeout 60 "build-fast/tests/${area}_test" "-sf=*tests/$folder/*" || status=$?
        if [ "$status" -eq 124 ]; then
            echo "Stopped after a minute: the suite runs them to the end."
        elif [ "$status" -ne 0 ]; then
            outcome=1
        fi
    done
    return "$outcome"
}

# Names of the suites to run, one on each line in $suites; those that are left out are printed.
choose_suites() {
    suites="" data=$(data_files)
    meson test -C build-fast --list 2>/dev/null | grep -v '^ninja:' | sed 's/.* \/ //' >"$stamps/list"
    while read -r suite; do
        programs=$(programs_of "$suite")
        # shellcheck disable=SC2086
        if [ -n "$programs" ] && ! newer "$(stamp_of "$suite")" $programs $data; then
            echo "$suite: left out, unchanged since it passed"
        else
            suites="$suites$suite
"
        fi
    done <"$stamps/list"
}

run_suites() {
    printf '%s' "$suites" >"$stamps/list"
    set --
    while read -r suite; do set -- "$@" "$suite"; done <"$stamps/list"
    if [ $# -eq 0 ]; then return 0; fi
    touch "$stamps/now"
    tests build-fast "$@"
    for suite in "$@"; do
        if grep -q "\"name\": \"$suite\".*\"result\": \"OK\"" build-fast/meson-logs/testlog.json; then
            touch -r "$stamps/now" "$(stamp_of "$suite")"
        fi
    done
}

# Drawn cases are a fourth of what CI draws: all suites are over within minutes.
check_fast() {
    export MOE_PLAN_DRAW_SHARE="${MOE_PLAN_DRAW_SHARE:-4}"
    started=$(date +%s)
    check_format
    part "formatting" "$started"

    say "Release build of what changed"
    started=$(date +%s)
    build build-fast -Dbuildtype=release -Dcuda=disabled
    part "build" "$started"

    say "Tests of changed folders"
    started=$(date +%s)
    mkdir -p "$stamps"
    touch "$stamps/begun"
    if ! run_changed_folders; then
        failed=$((failed + 1))
        return
    fi
    mv "$stamps/begun" "$stamps/first"
    part "tests of changed folders" "$started"

    say "Release suites"
    started=$(date +%s)
    choose_suites
    run_suites
    part "release suites" "$started"
}
