import json
import logging
import os
from pathlib import Path

import pytest
from support.command import ARGUMENTS, OFF, assert_messages

import fgoffload
from fgoffload.cli import main
from fgoffload.cli.streams import LibraryLog

BEFORE_TORCH = [
    ((), "COMMAND is missing. Give one, as in: fgoffload train arguments/tiny_moe.sh."),
    (("train",), "ARGUMENTS.sh is missing. Give a Megatron argument file first"),
    (("train", ""), "ARGUMENTS.sh is missing. Give a Megatron argument file first"),
    (("trian",), "COMMAND 'trian' is not one of: train, run, plan, profile, bench, doctor. Did you mean train?"),
    (("train", os.devnull), f"argument file '{os.devnull}' is no regular file. Give a file"),
    (("train", "x" * 5000), "does not exist. Give a file"),
    (("train", "none.sh"), "argument file 'none.sh' does not exist. Give a file"),
    (("train", "."), "argument file '.' is a folder. Give a file"),
    (("train", ARGUMENTS, "--steps", "x"), "--steps 'x' is not a whole number. Give one from 1, as in 10."),
    (("train", ARGUMENTS, "--steps", "0"), "--steps 0 is below 1. Give 1 or more"),
    (("train", ARGUMENTS, "--steps", "-3"), "--steps -3 is below 1. Give 1 or more"),
    (("train", ARGUMENTS, "--steps", "1_0"), "--steps '1_0' is not a whole number. Give one from 1, as in 10."),
    (("train", ARGUMENTS, "--steps"), "--steps expected one argument. Give it after the flag, as in --steps 10."),
    (("train", ARGUMENTS, "--data", ""), "--data '' names nothing. Give a text file"),
    (("train", ARGUMENTS, "--plot", ""), "--plot '' is no picture's name. End it with one of .png"),
    (("train", ARGUMENTS, "--plot", "~nobody-of-this-name/memory.png"), "does not exist. Make it or give another."),
    (("train", ARGUMENTS, "--plot", f"{'x' * 300}.png"), "cannot be written: File name too long. Give a file"),
    (("train", ARGUMENTS, "--plot", "memory.txt"), "--plot 'memory.txt' is no picture's name. End it with one of .png"),
    (("train", ARGUMENTS, "--plot", "none/memory.png"), "--plot 'none/memory.png': folder 'none' does not exist."),
]

SITE = {"chunk": 0, "layer": 0, "tag": "core_attn", "action": "offload"}

AFTER_TORCH = [
    (("--moe-router-topk", "5"), "--moe-router-topk 5 is above --num-experts 4. Give --moe-router-topk 4 or less"),
    (("--num-experts", "1"), "--moe-router-topk 2 is above --num-experts 1."),
    (("--moe-router-topk", "0"), "the command line: --moe-router-topk 0 is below 1. Give 1 or more."),
    (("--lr", "-1"), "error: the command line: --lr -1.0 is no learning rate. Give a finite number from 0"),
    (("--seed", "9" * 20), f"error: the command line: --seed {'9' * 20} is outside 0 to 4294967295."),
    (("--vocab-size", "100", "--make-vocab-size-divisible-by", "1"), "--vocab-size 100, padded to 100 by"),
    (("--kv-channels", "0"), "error: the command line: --kv-channels 0 is below 1."),
    (("--kv-channels", "7"), "--kv-channels 7 is odd, and --position-embedding-type rope turns pairs"),
    (
        ("--group-query-attention", "--num-query-groups", "3"),
        f"{ARGUMENTS} and the command line: --num-query-groups 3 does not divide --num-attention-heads 8.",
    ),
    (("--expert-tensor-parallel-size", "2"), "the experts of a model take 2 processes (expert-tensor x expert x pipeline"),
    (("--offload-prefetch", "-1MiB"), "--offload-prefetch '-1MiB' is below 0, and sizes cannot be negative."),
    (("--offload-plan", "none.json"), "--offload-plan none.json: No such file or directory."),
    (("--offload-plan", "short.txt"), "--offload-plan short.txt is not JSON"),
    (("--step", "3"), "the command line: --step is not a flag that this version knows. Did you mean --steps?"),
    (("--offload-modules", "core_attn,attn_proj"), "separate tags with blanks, as in --offload-modules core_attn attn_proj."),
    (("--data", os.devnull), f"--data {os.devnull} is no regular file. Give a text file"),
    (("--pipeline-model-parallel-size", "2"), "one copy of the model takes 2 processes (tensor x pipeline x context parallel"),
    (("--context-parallel-size", "2"), "and there is 1. Start a multiple of 2, as in torchrun --nproc-per-node 2 -m"),
    (("--window-size", "3"), "error: the command line: --window-size '3' is not two whole numbers."),
    (("--min-offloaded-tensor-size", "many"), "--min-offloaded-tensor-size 'many' is not a whole number."),
    (("--activation-offload-fraction", "1.5"), "--activation-offload-fraction 1.5 is outside 0 to 1."),
    (("--offload-window", "60PB"), "--offload-window '60PB' is not a size."),
    (("--offload-window", "5"), "--offload-window '5' has no unit. Add one of B, KiB, MiB, GiB, TiB, as in 5GiB."),
    (("--offload-prefetch", "5"), "--offload-prefetch '5' has no unit."),
    (("--offload-modules", "core_atn"), "--offload-modules 'core_atn' is not a tag. Did you mean 'core_attn'?"),
    (("--offload-modules", "attn_proj"), "--offload-modules 'attn_proj' needs 'core_attn' with it"),
    (("--offload-modules",), "--offload-modules is empty: nothing would leave. Name at least one of: layer_input attn_norm"),
    (("--data", "none.txt"), "--data none.txt does not exist. Give a text file"),
    (("--data", "empty.txt"), "--data empty.txt holds no bytes. Give a text file"),
    (("--data", "short.txt"), "--data short.txt has 3 bytes and --seq-length"),
    (("--micro-batch-size", "0"), "--micro-batch-size 0 is below 1. Give 1 or more."),
    (("--num-layer", "4"), "--num-layer is not a flag that this version knows. Did you mean --num-layers?"),
    (("--tensor-model-parallel-size", "2"), "and there is 1. Start a multiple of 2, as in torchrun --nproc-per-node 2"),
    (("extra",), "'extra' stands where a flag should."),
]


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_and_refuse(arguments, capsys):
    """Return the one line that the command ended with, after checking that it did nothing else."""
    before = sorted(Path().iterdir())
    code = main(arguments)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert code == 2
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("fgoffload: error: ")
    assert sorted(Path().iterdir()) == before
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"), BEFORE_TORCH, ids=[" ".join(case[0][1:])[-80:] or "none" for case in BEFORE_TORCH]
)
def test_bad_input_ends_with_code_2_and_one_line(arguments, message, capsys):
    assert message in run_and_refuse(arguments, capsys)


@pytest.mark.parametrize(("flags", "message"), AFTER_TORCH, ids=[" ".join(case[0]) for case in AFTER_TORCH])
def test_a_bad_flag_or_text_ends_with_code_2_and_one_line(flags, message, capsys):
    Path("empty.txt").touch()
    Path("short.txt").write_text("abc", encoding="utf-8")
    assert message in run_and_refuse(("train", ARGUMENTS, *flags), capsys)


def test_an_argument_file_without_flags_ends_with_code_2_and_one_line(capsys):
    Path("none.sh").write_text("# nothing\n", encoding="utf-8")
    assert "none.sh holds no array of flags" in run_and_refuse(("train", "none.sh"), capsys)


def test_an_argument_file_that_would_run_a_command_is_refused_with_its_line(capsys):
    Path("run.sh").write_text("# a model\nARGS=($(touch seen))\n", encoding="utf-8")
    assert "run.sh, line 2: command substitution" in run_and_refuse(("train", "run.sh"), capsys)


def test_an_error_of_several_lines_is_shown_in_one(capsys, monkeypatch):
    def refuse(options, megatron_flags):
        raise fgoffload.StateError("first\n  second")

    monkeypatch.setattr("fgoffload.cli.train.run", refuse)
    assert run_and_refuse(("train", ARGUMENTS), capsys) == "fgoffload: error: first second"


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"fgoffload {fgoffload.__version__}\n")


def test_a_training_with_offload_is_compared_and_drawn(capsys):
    assert main(["train", ARGUMENTS, "--steps", "3"]) == 0
    shown, said = capsys.readouterr()
    assert_messages(said, "training without offload: 3 steps", "training with offload: 3 steps")
    for row in ("losses equal to the bit", "gradients equal to the bit"):
        assert [line.split("│")[3].strip() for line in shown.splitlines() if row in line] == ["yes"]
    assert Path("memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_without_offload_flags_runs_once_and_says_so(capsys):
    Path("off.sh").write_text(OFF, encoding="utf-8")
    assert main(["train", "off.sh", "--steps", "1", "--plot", "off.svg"]) == 0
    shown = capsys.readouterr().out
    assert "Trained once: offload is off." in shown
    assert "with offload" not in shown.replace("without offload", "")
    assert Path("off.svg").is_file()


def test_a_gradient_that_differs_ends_with_code_1_and_names_the_parameter(capsys, monkeypatch):
    from fgoffload.cli import measurement

    read_step = measurement._read_step

    def read_and_change(result):
        record = read_step(result)
        changes.append(record)
        if len(changes) == 4:  # the second step of the second training
            record.gradient_digests[next(iter(record.gradient_digests))] = "changed"
        return record

    changes = []
    monkeypatch.setattr(measurement, "_read_step", read_and_change)
    assert main(["train", ARGUMENTS, "--steps", "2"]) == 1
    first = next(iter(changes[0].gradient_digests))
    assert f"The gradients differ: first in step 2, {first}." in capsys.readouterr().out


def test_a_plot_that_cannot_be_written_is_refused_before_training(capsys):
    Path("folder.png").mkdir()
    assert "--plot 'folder.png' is a folder." in run_and_refuse(("train", ARGUMENTS, "--plot", "folder.png"), capsys)
    os.mkfifo("pipe.png")
    assert "--plot 'pipe.png' is no regular file." in run_and_refuse(("train", ARGUMENTS, "--plot", "pipe.png"), capsys)


def test_checking_where_the_plot_goes_changes_no_file(capsys):
    Path("memory.png").write_bytes(b"earlier")
    run_and_refuse(("train", ARGUMENTS, "--lr", "-1"), capsys)
    assert Path("memory.png").read_bytes() == b"earlier"


def test_a_plot_that_fails_while_it_is_written_ends_with_one_line_after_the_table(capsys, monkeypatch):
    def fail(path, records, setting):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fgoffload.cli.report.write_memory_plot", fail)
    Path("off.sh").write_text(OFF, encoding="utf-8")
    assert main(["train", "off.sh", "--steps", "1"]) == 2
    shown, said = capsys.readouterr()
    assert "activations at peak" in shown
    assert_messages(
        said,
        "training without offload: 1 step",
        "fgoffload: error: --plot 'memory.png' cannot be written: No space left on device. Give another file.",
    )


def test_a_tilde_is_the_home_folder(capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    Path("home").mkdir()
    Path("home/text.txt").write_bytes(bytes(range(256)) * 4)
    Path("off.sh").write_text(OFF, encoding="utf-8")
    assert main(["train", "off.sh", "--steps", "1", "--data", "~/text.txt", "--plot", "~/memory.svg"]) == 0
    assert Path("home/memory.svg").is_file()
    capsys.readouterr()


@pytest.mark.parametrize("sizes", [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "1"}], ids=str)
def test_what_no_launcher_of_several_processes_set_is_not_looked_at(sizes, capsys, monkeypatch):
    for name, value in (*sizes.items(), ("LOCAL_RANK", "7"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    Path("off.sh").write_text(OFF, encoding="utf-8")
    assert main(["train", "off.sh", "--steps", "1"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("failing_call", "when"), [("__init__", "while the model was built"), ("run_step", "in the first step")]
)
def test_what_megatron_raises_at_first_is_one_line_that_says_how_to_see_more(failing_call, when, capsys, monkeypatch):
    def fail(self, *args, **kwargs):
        raise IndexError("index 7 is out of range")

    monkeypatch.setattr(f"fgoffload.cli.measurement.Trainer.{failing_call}", fail)
    assert main(["train", ARGUMENTS, "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert f"{ARGUMENTS}: Megatron-Core refused these arguments {when}: IndexError: index 7 is out of range." in said
    assert "Set FGOFFLOAD_TRACEBACK=1 to see the traceback." in said
    assert "Traceback" not in said

    monkeypatch.setenv("FGOFFLOAD_TRACEBACK", "1")
    assert main(["train", ARGUMENTS, "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "in fail" in said  # the original is chained


@pytest.mark.parametrize("failing_step", [2, 3])
def test_a_fault_of_a_later_step_is_not_hidden(failing_step, capsys, monkeypatch):
    from fgoffload.cli import measurement

    run_step = measurement.Trainer.run_step
    steps = []

    def run_and_fail(trainer):
        steps.append(trainer)
        if len(steps) == failing_step:
            raise IndexError("later")
        return run_step(trainer)

    monkeypatch.setattr(measurement.Trainer, "run_step", run_and_fail)
    with pytest.raises(IndexError, match="later"):
        main(["train", ARGUMENTS, "--steps", "3"])
    capsys.readouterr()


def test_a_fault_with_offload_alone_is_not_blamed_on_the_arguments(capsys, monkeypatch):
    from fgoffload.cli import measurement

    run_step = measurement.Trainer.run_step

    def run_or_fail(trainer):
        if trainer.integration is not None:
            raise IndexError("ours")
        return run_step(trainer)

    monkeypatch.setattr(measurement.Trainer, "run_step", run_or_fail)
    assert main(["train", ARGUMENTS, "--steps", "1"]) == 2
    assert "offload failed in the first step, and without offload the same arguments trained: IndexError: ours." in (
        capsys.readouterr().err
    )


def test_a_combination_that_megatron_refuses_with_offload_is_found_before_the_first_training(capsys, monkeypatch):
    from fgoffload.cli import measurement

    build = measurement.build_transformer_config

    def refuse(arguments, *, offload):
        if offload is not None:
            raise arguments.source.refuse("--offload-modules moe_act is refused.")
        return build(arguments, offload=offload)

    monkeypatch.setattr(measurement, "build_transformer_config", refuse)
    assert "tiny_moe.sh: --offload-modules moe_act is refused." in run_and_refuse(("train", ARGUMENTS), capsys)


def test_a_warning_of_the_library_is_shown_once_as_ours(capsys):
    assert main(["train", ARGUMENTS, "--steps", "1", "--activation-offload-fraction", "0"]) == 0
    assert_messages(
        capsys.readouterr().err,
        "fgoffload: warning: --activation-offload-fraction 0 keeps all sites on the device: nothing leaves. Give a part above "
        "0, or --no-fine-grained-activation-offloading.",
        "training without offload: 1 step",
        "training with offload: 1 step",
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"made_for": {"num_layers": 5}}, "plan.json: The plan was made for num_layers 5, and this training has 4."),
        ({"made_for": {"params_dtype_bytes": 2}}, "The plan was made for params_dtype_bytes 2, and this training has 4."),
        ({"made_for": {"tokens": 8}}, "The plan was made for tokens 8, and this training has 256."),
        ({"made_for": {"microbatches": 1}}, "The plan was made for microbatches 1, and this training has 4."),
        ({"sites": [SITE | {"layer": 4}]}, "names layers.4.core_attn in chunk 0, and the model has 4 layers and 1 chunk(s)"),
        ({"sites": [SITE | {"chunk": 1}]}, "names layers.0.core_attn in chunk 1, and the model has 4 layers and 1 chunk(s)"),
        ({"sites": [SITE | {"tag": "core_atn"}]}, "--offload-plan plan.json 'core_atn' is not a tag"),
    ],
)
def test_a_plan_of_another_training_is_found_before_the_first_training(capsys, document, message):
    Path("plan.json").write_text(json.dumps({"format": 1, "sites": [], **document}), encoding="utf-8")
    assert message in run_and_refuse(("train", ARGUMENTS, "--offload-plan", "plan.json"), capsys)


def test_a_warning_of_flags_is_left_out_beside_an_error(capsys, tmp_path):
    flags = ("--activation-offload-fraction", "0", "--data", str(tmp_path / "none"))
    assert "does not exist" in run_and_refuse(("train", ARGUMENTS, *flags), capsys)


def test_after_a_command_the_librarys_loggers_are_as_before(capsys):
    logger = logging.getLogger("fgoffload")
    before = (logger.level, list(logger.handlers))
    main(["train"])
    capsys.readouterr()
    assert (logger.level, list(logger.handlers)) == before


def test_offload_can_be_switched_off_on_the_command_line(capsys):
    assert main(["train", ARGUMENTS, "--steps", "1", "--no-fine-grained-activation-offloading"]) == 0
    shown, said = capsys.readouterr()
    assert "Trained once: offload is off." in shown
    assert_messages(said, "training without offload: 1 step")


def test_what_auto_has_planned_is_shown_and_other_news_is_not(capsys):
    with LibraryLog().attached():
        logging.getLogger("fgoffload.integrations.megatron.auto").info("2 of 9 sites leave")
        logging.getLogger("fgoffload.integrations.megatron.site_actions").info("chunk 0")
        logging.getLogger("fgoffload.engine.engine").warning("late")
    assert capsys.readouterr().err.splitlines() == ["fgoffload: 2 of 9 sites leave", "fgoffload: warning: late"]
