# Sections of a CI job, sourced by the jobs beside it. Every section runs even where one before it failed, so that one
# run shows all there is to mend; `finish` makes the job fail then, and adds up the suites like pytest does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MAIN_TORCH=2.13.0
OTHER_TORCHES=(2.15.0 2.11.0)
export PYTHONUNBUFFERED=1
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed_parts=()
summaries=()

section() {  # section NAME COMMAND...: runs it under a headline, remembers a failure
    local name=$1 log="$logs/log" start=$SECONDS
    shift
    printf '\n======== %s: %s\n' "$name" "$*"
    # pytest's "no tests ran" (exit code 5) reaches us through make as a failure like any other.
    if "$@" 2>&1 | tee "$log"; then
        printf -- '-------- %s: ok, %ds\n' "$name" $((SECONDS - start))
    else
        printf -- '-------- %s: FAILED, %ds\n' "$name" $((SECONDS - start))
        failed_parts+=("$name")
    fi
}

suite() {  # suite NAME COMMAND...: a section that runs pytest and must say how many tests passed
    local line
    section "$@"
    line=$(grep -E '^=+ .*(passed|failed|error|no tests ran).* in [0-9.]+s' "$logs/log" | tail -n 1 || true)
    if [[ ! $line =~ [0-9]+\ passed ]]; then
        printf 'no test passed in: %s\n' "$1"
        failed_parts+=("$1 (no test passed)")
    fi
    summaries+=("$line")
}

whole_suite() {  # whole_suite NAME COMMAND...: a suite in which no test may be skipped
    suite "$@"
    if [[ ${summaries[-1]} =~ [0-9]+\ skipped ]]; then
        printf 'skipped in: %s\n' "$1"
        failed_parts+=("$1 (skipped tests)")
    fi
}

count() {  # count WORD: the sum over all suites of the number before WORD
    printf '%s\n' "${summaries[@]}" | { grep -oE "[0-9]+ $1" || true; } | awk '{ n += $1 } END { print n + 0 }'
}

finish() {
    local i
    printf '\n======== all of it: %ds\n' "$SECONDS"
    for i in "${!failed_parts[@]}"; do printf 'FAILED: %s\n' "${failed_parts[$i]}"; done
    printf '==== %d passed, %d failed, %d skipped in %d.0s ====\n' \
        "$(count passed)" "$(($(count failed) + $(count error)))" "$(count skipped)" "$SECONDS"
    [[ ${#failed_parts[@]} -eq 0 ]]
}
