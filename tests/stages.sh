# Stages of a tier of tests, for run_check.sh and run_all.sh: each runs, and a table says which failed.
names=() results=() seconds=() failed=0

stage() {
  local name=$1 start=$SECONDS
  shift
  printf '\n==> %s\n' "$name"
  local result=passed
  "$@" || { result=FAILED; failed=1; }
  names+=("$name") results+=("$result") seconds+=($((SECONDS - start)))
}

finish() {
  printf '\n'
  for i in "${!names[@]}"; do
    printf '  %-7s %5ss  %s\n' "${results[$i]}" "${seconds[$i]}" "${names[$i]}"
  done
  [ "$failed" -eq 0 ] && echo "All tests passed." || echo "Some tests FAILED."
  exit "$failed"
}
