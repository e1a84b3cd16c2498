#!/bin/bash
source $(dirname $0)/common.sh
while [[ $# -gt 0 ]]; do
    case $1 in
        --help) MODE=1; shift ;;
    esac
done
OPTIONS="\
  --seq-length ${LENGTH-4096} \
  --${PRECISION:-bf16} $(cat more.txt) "
