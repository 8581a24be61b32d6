#!/bin/bash
# Send a signal to the last rank of a run after a step, for chapter 7 of the lecture.
#
# bash examples/signal_rank.sh SIGNAL STEP OUT torchrun ... train.py --out OUT ...

signal=$1 step=$2 out=$3
shift 3
"$@" &
torchrun=$!
until grep -qs "\"step\": $step," "$out/metrics.jsonl"; do
    kill -0 $torchrun 2> /dev/null || exit 1  # torchrun ended before that step
    sleep 0.1
done
kill -"$signal" "$(pgrep -P $torchrun | tail -1)"  # torchrun starts its ranks in order
SECONDS=0
wait $torchrun
echo "the job was gone after $SECONDS s"
