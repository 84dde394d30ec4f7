"""Reading a config: what is accepted, and the one clear error for everything else."""

import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankloom.base.errors import ConfigError, MeshError
from rankloom.base.mesh import Mesh
from rankloom.data.tokenizer import ByteTokenizer
from rankloom.models.config import MoEConfig
from rankloom.train import checks
from rankloom.train.run import schema
from rankloom.train.run.config import load_config, make_config, parse_overrides, with_ranks, write_config
from rankloom.train.run.schema import Config

MINIMAL = "[train]\nglobal_batch_size = 8\n"
SIXTEEN = MINIMAL.replace("8", "16")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A function that writes `train.toml` in an empty current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text=MINIMAL):
        (tmp_path / "train.toml").write_text(text)
        return "train.toml"

    return write


def test_a_minimal_file_gets_the_defaults(file):
    config = load_config(file())
    assert config.train.global_batch_size == 8
    assert (config.optimizer.name, config.schedule.decay, config.comm.all_reduce) == ("adamw", "cosine", "backend")


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("axis", ["pipe", "context", "tensor"])
def test_every_precision_goes_with_every_axis_as_in_prepare(file, axis, precision):
    config = load_config(file(), ["--model.preset", "1M", f"--mesh.{axis}", "2", "--train.precision", precision])
    assert config.train.precision == precision


def test_an_override_replaces_the_value_of_the_file_in_both_spellings(file):
    config = load_config(file(), ["--mesh.replicate", "4", "--train.steps=200", "--optimizer.betas", "[0.8, 0.9]"])
    assert (config.mesh.replicate, config.train.steps, config.optimizer.betas) == (4, 200, (0.8, 0.9))


def test_the_last_override_of_a_key_wins(file):
    assert load_config(file(), ["--train.steps", "1", "--train.steps", "2"]).train.steps == 2


def test_a_text_key_takes_its_override_verbatim(file):
    config = load_config(file(), ["--run.name", "7", "--data.source", "true"])
    assert (config.run.name, config.data.source) == ("7", "true")


@pytest.mark.parametrize("text, lr", [(".001", 0.001), ("1.", 1.0), ("+.5e-2", 0.005)])
def test_a_number_on_the_command_line_needs_no_digits_on_both_sides_of_its_point(file, text, lr):
    assert load_config(file(), ["--optimizer.lr", text]).optimizer.lr == lr


def test_none_takes_a_key_back_to_being_left_out(file):
    flags = ["--train.global_batch_size", "none", "--train.local_batch_size", "2"]
    assert load_config(file(), flags).train.global_batch_size is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mesh]\ntenosr = 2\n", "train.toml [mesh]: unknown key 'tenosr'. Did you mean 'tensor'?"),
        ("[mehs]\nreplicate = 2\n", "train.toml: unknown section [mehs]. Did you mean 'mesh'?"),
        ("steps = 2\n", "train.toml: unknown section [steps]. It is a key of [train]."),
        ("[model.moe]\nexpert = 4\n", "train.toml [model.moe]: unknown key 'expert'. Did you mean 'experts'?"),
        ("[model.moe]\nexperts = 4.0\n", "train.toml [model.moe]: experts = 4.0: must be a valid integer"),
        ("[model.mooe]\nexperts = 4\n", "train.toml [model]: unknown key 'mooe'. Did you mean 'moe'?"),
        ("[model]\nmoe = 4\n", "train.toml [model.moe]: must be a section of `key = value` lines"),
        ("[moe]\nexperts = 4\n", "train.toml: unknown section [moe]. It is a key of [model]."),
        ("[train]\nsteps = '2'\n", "train.toml [train]: steps = '2': must be a valid integer"),
        ("[train]\nsteps = 2.0\n", "train.toml [train]: steps = 2.0: must be a valid integer"),
        ("[train]\nsteps = true\n", "train.toml [train]: steps = True: must be a valid integer"),
        ("[train]\nsteps = 0\n", "train.toml [train]: steps = 0: must be greater than or equal to 1"),
        ("[optimizer]\nlr = inf\n", "train.toml [optimizer]: lr = inf: must be a finite number"),
        ("[optimizer]\nbetas = [0.9]\n", "train.toml [optimizer]: betas = [0.9]: must be two numbers in brackets"),
        ("[schedule]\ndecay = 'cosin'\n", "must be 'cosine', 'linear' or 'constant'"),
        ("[comm]\ntimeout = 1e10\n", "train.toml [comm]: timeout = 10000000000.0: must be less than or equal to 2000000"),
        ("[run]\nname = '../x'\n", "train.toml [run]: name = '../x': must be ASCII letters, digits"),
        ("[run]\nname = 'none'\n", 'name cannot be "none", the word that removes a key on the command line'),
        ("train = 3\n", "train.toml [train]: must be a section of `key = value` lines"),
        ("\n\nsteps 2\n", "train.toml: not valid TOML: Expected '=' after a key in a key/value pair (at line 3, column 7): steps 2"),
        ("[train]\nsteps = 2\nsteps = 3\n", "train.toml: not valid TOML: Cannot overwrite a value (at line 3, column 10): steps = 3"),
        ("", "train.toml [train]: give local_batch_size or global_batch_size"),
    ],
)
def test_a_mistake_in_the_file_names_file_section_key_and_cure(file, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(file(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh.tenosr", "2"], "--mesh.tenosr: unknown key 'tenosr'. Did you mean 'tensor'?"),
        (["--mehs.tensor", "2"], "--mehs.tensor: unknown section [mehs]. Did you mean 'mesh'?"),
        (["--train.stpes", "none"], "--train.stpes: unknown key 'stpes'. Did you mean 'steps'?"),
        (["--tarin.steps", "none"], "--tarin.steps: unknown section [tarin]. Did you mean 'train'?"),
        (["--train.steps", "x"], "--train.steps: steps = 'x': must be a valid integer"),
        (["--train.steps"], "--train.steps: needs a value"),
        (["--model.tie"], "--model.tie: needs a value after it, also where that is true or false"),
        (["--model.tie", "True"], "--model.tie: tie = 'True': must be a valid boolean (true or false)"),
        (["steps=3"], "steps=3: not an option"),
        (["--steps", "3"], "a setting of the file is overridden by --section.key value. Did you mean --train.steps?"),
        (["--mesh", "pipe"], "--mesh: not an option"),
        (["--mesh", "pipe=2,,"], "--mesh.pipe: pipe = '2,,': must be a valid integer"),
        (["--mesh", "replicate=2,tenosr=2"], "--mesh.tenosr: unknown key 'tenosr'. Did you mean 'tensor'?"),
        (["--model.moe.expert", "4"], "--model.moe.expert: unknown key 'expert'. Did you mean 'experts'?"),
        (["--model.mooe.experts", "4"], "--model.mooe.experts: unknown key 'mooe'. Did you mean 'moe'?"),
        (["--model.mooe.experts", "none"], "--model.mooe.experts: unknown section [model.mooe]. Did you mean 'model.moe'?"),
        (["--model.moe", "4"], "--model.moe: must be a section"),
        (["--train.global_batch_size.x", "4"], "--train.global_batch_size.x: unknown section [train.global_batch_size]"),
        (["--train.steps", "--train.seq_len", "4"], "--train.steps: needs a value"),
        (["--train.recompute", "ful"], "--train.recompute: recompute = 'ful': must be 'none', 'selective', 'full', or the bytes"),
        (["--train.recompute", "3 oxen"], "--train.recompute: recompute = '3 oxen': size '3 oxen': expected a number of bytes"),
        (["--mesh.pipe", "1" * 30], "--mesh.pipe: pipe = 1111"),
    ],
)
def test_a_mistake_in_an_override_names_the_flag(file, flags, message):
    with pytest.raises(ConfigError) as caught:
        load_config(file(), flags)
    assert message in str(caught.value)
    assert "train.toml" not in str(caught.value), "the file is not to blame"


def test_several_keys_of_a_section_may_stand_in_one_word(file):
    text = MINIMAL + "[model]\npreset = '1M'\n"
    apart = load_config(file(text), ["--mesh.context", "2", "--mesh.tensor", "2", "--train.steps", "7", "--optimizer.betas", "[0.8,0.9]"])
    for words in (["--mesh", "context=2,tensor=2", "--train", "steps=7", "--optimizer", "betas=[0.8,0.9]"],
                  ["--mesh=tensor=2,context=2", "--train.steps=7", "--optimizer=betas=[0.8,0.9]"]):
        assert load_config(file(text), words) == apart


@pytest.mark.parametrize("words", [["--model.moe", "experts=4,top_k=1"], ["--model.moe=experts=4", "top_k=1"]], ids=" ".join)
def test_so_may_those_of_a_section_inside_a_section(file, words):
    assert load_config(file(), words) == load_config(file(), ["--model.moe.experts", "4", "--model.moe.top_k", "1"])
    with pytest.raises(ConfigError, match="--model.moe.tops: unknown key 'tops'"):
        load_config(file(), ["--model.moe", "experts=4,tops=1"])


@pytest.mark.parametrize(("flags", "stage"), [
    ([], 0), (["--mesh.replicate", "2"], 0), (["--mesh.shard", "1"], 0), (["--mesh.shard", "2"], 3),
    (["--mesh", "replicate=2,shard=2"], 3), (["--mesh.shard", "2", "--train.stage", "1"], 1)], ids=str)
def test_ranks_along_shard_share_parameters_too_unless_a_stage_is_given(file, flags, stage):
    assert load_config(file(), flags).train.stage == stage


@pytest.mark.parametrize("words", [["--mesh", "pipe=2,tensor=2"], ["--mesh=pipe=2,tensor=2"], ["--mesh", "pipe=2, tensor=2"],
                                   ["--mesh", "pipe=2,", "tensor=2"], ["--mesh", "pipe=2", "tensor=2"]], ids=" ".join)
def test_spaces_between_the_keys_of_a_section_do_no_harm(file, words):
    found = [(each.section, each.key, each.text) for each in parse_overrides([*words, "--train.steps", "5"])]
    assert found == [("mesh", "pipe", "2"), ("mesh", "tensor", "2"), ("train", "steps", "5")]


@pytest.mark.parametrize("words", [["--mesh", "pipe=2,tensor=2,pipe=3"], ["--mesh=pipe=2", "pipe=3"]], ids=" ".join)
def test_a_key_that_stands_twice_in_one_list_is_refused(words):
    with pytest.raises(ConfigError, match="--mesh: pipe is given twice in '"):
        parse_overrides(words)


@pytest.mark.parametrize("flags", [
    ["--comm.compress=int8"], ["--comm.all_reduce=ring"], ["--mesh.tensor=2", "--model.preset=1M"], ["--mesh.pipe=2"],
    ["--train.accumulate=2"], ["--train.threads=2"], ["--mesh.context=2", "--mesh.replicate=16"]], ids=" ".join)
def test_what_the_command_line_asks_for_wins_over_the_deterministic_of_the_file_and_a_warning_says_so(file, flags):
    before, path = load_config(file(SIXTEEN), flags), file(SIXTEEN + "deterministic = true\n")
    with pytest.warns(UserWarning, match=r"\[train\] deterministic of train.toml is off in this run, because of .*deterministic"):
        assert load_config(path, flags) == before
    with pytest.raises(ConfigError, match="deterministic"):
        load_config(path, [*flags, "--train.deterministic=true"])


def test_what_is_wrong_without_it_too_is_told_in_place_of_it(file):
    with pytest.raises(ConfigError, match=r"heads = 2 cannot be shared evenly by \[mesh\] tensor 3"):
        load_config(file(SIXTEEN + "deterministic = true\n"), ["--mesh.tensor=3", "--model.preset=1M"])


@pytest.mark.parametrize(("text", "flags"), [
    ("deterministic = true\n", ["--mesh.replicate=16"]), ("deterministic = true\n[comm]\ncompress = 'int8'\n", []),
    ("deterministic = true\n[comm]\ncompress = 'int8'\n", ["--train.steps=5"])], ids=["shards enough", "no flag", "the file itself"])
def test_it_stays_where_another_number_would_do_or_the_file_contradicts_itself(file, text, flags):
    with pytest.raises(ConfigError, match="deterministic"):
        load_config(file(SIXTEEN + text), flags)


def test_the_warm_up_of_a_file_ends_with_a_run_that_is_made_shorter(file):
    text = MINIMAL + "steps = 200\n[schedule]\nwarmup_steps = 100\n"
    warmup = lambda *flags: load_config(file(text), flags).schedule.warmup_steps
    assert [warmup(), warmup("--train.steps=150"), warmup("--train.steps", "20")] == [100, 100, 20]
    with pytest.raises(ConfigError, match=r"\[schedule\] warmup_steps 30 is more than \[train\] steps 20: give --schedule.warmup_steps"):
        warmup("--train.steps=20", "--schedule.warmup_steps=30")
    with pytest.raises(ConfigError, match="steps = 0"):
        warmup("--train.steps=0")
    assert warmup("--train.steps=none") == 100
    with pytest.raises(ConfigError, match=r"\[train\]: must be a section"):
        load_config(file("train = 3\n[schedule]\nwarmup_steps = 100\n"), ["--train.steps=5"])


def test_every_wrong_key_has_its_line_in_the_one_error(file):
    with pytest.raises(ConfigError) as caught:
        load_config(file(), ["--train.steps", "0", "--optimizer.lr", "-1", "--train.deterministic", "x"])
    assert [line.partition(":")[0] for line in str(caught.value).split("\n")] == [
        "--train.steps", "--train.deterministic", "--optimizer.lr"
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--train.stage", "4"],
        ["--train.offload", "true"],
        ["--train.reshard_after_forward", "false"],
        ["--train.stage", "3", "--mesh.shard", "2", "--mesh.pipe", "2", "--train.reshard_after_forward", "false"],
        ["--train.stage", "3", "--mesh.shard", "4", "--train.reshard_after_forward", "3"],
        ["--train.stage", "3", "--mesh.replicate", "1", "--train.reshard_after_forward", "2"],
        ["--train.recompute", "some"],
        ["--train.stage", "3", "--mesh.replicate", "2"],
        ["--train.stage", "3", "--mesh.shard", "2", "--comm.compress", "powersgd"],
        ["--train.stage", "1", "--mesh.shard", "2", "--comm.all_reduce", "ring"],
        ["--mesh.expert", "2"],
        ["--model.moe.experts", "3", "--mesh.expert", "2"],
        ["--model.moe.experts", "4", "--model.moe.top_k", "5"],
        ["--model.moe.experts", "4", "--model.ffn", "64"],
        ["--model.moe.capacity", "-1"],
        ["--model.moe.experts", "4", "--mesh.expert", "2", "--train.deterministic", "true"],
        ["--model.moe.experts", "4", "--mesh.expert", "2", "--comm.all_reduce", "ring"],
        ["--train.pipe", "gpipe"],
        ["--mesh.tensor", "2", "--train.deterministic", "true"],
        ["--mesh.context", "2", "--comm.all_reduce", "ring"],
        ["--train.stage", "0", "--mesh.shard", "2"],
        ["--data.vocab_size", "300"],
        ["--data.tokenizer", "bpe"],
        ["--train.deterministic", "true", "--train.accumulate", "2"],
        ["--train.deterministic", "true", "--comm.all_reduce", "ring"],
        ["--train.deterministic", "true", "--train.threads", "2"],
        ["--train.deterministic", "2", "--mesh.replicate", "4"],
        ["--train.evaluate", "false"],
        ["--train.evaluate", "false", "--train.eval_every", "3", "--data.baseline", "false"],
        ["--data.source", "a.npy"],
        ["--data.source", "a.npy", "--data.vocab_size", "9", "--data.tokenizer", "bytes"],
        ["--data.tokenizer", "bep"],
        ["--model.preset", "2M"],
        ["--model.heads", "5"],
        ["--optimizer.momentum", "0.9"],
        ["--optimizer.name", "sgd", "--optimizer.betas", "[0.9, 0.9]"],
        ["--optimizer.lr_scaling", "linear"],
        ["--optimizer.base_batch_size", "8"],
        ["--schedule.decay", "constant", "--schedule.min_lr_ratio", "0.1"],
        ["--schedule.warmup_steps", "2000"],
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(file, flags):
    with pytest.raises(ConfigError):
        load_config(file(), flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh.tensor=2"], "[model] heads = 3 cannot be shared evenly by [mesh] tensor 2: 3 / 2 = 1.5 on each rank; the axis must"),
        (["--mesh.tensor=2", "--model.heads=6", "--model.kv_heads=3"], "[model] kv_heads = 3 and [mesh] tensor 2: one must divide by the"),
        (["--mesh.tensor=3", "--model.ffn=64"], "[model] ffn = 64 cannot be shared evenly by [mesh] tensor 3: 64 / 3 = 21.33"),
        (["--mesh.pipe=7", "--model.layers=4"], "[mesh] pipe 7 needs 7 stages for a model of 6 pieces: the embedding, 4 layers"),
        (["--mesh.pipe=4", "--model.layers=4", "--train.pipe=interleaved"], "pipe 4 needs 8 stages for a model of 6 pieces"),
        (["--train.precision=fp8", "--model.width=24", "--model.heads=4", "--model.kv_heads=4"], "width = 24 does not divide by 16"),
        (["--train.precision=fp8", "--model.width=16", "--model.heads=2", "--model.kv_heads=2", "--mesh.tensor=2"],
         "[model] width = 16 over [mesh] tensor 2 leaves 8 a rank, which does not divide by 16; take multiples of 16, or"),
        (["--train.precision=fp8", "--model.width=64", "--model.heads=2", "--model.kv_heads=2", "--model.ffn=48", "--mesh.tensor=2"],
         "[model] ffn = 48 over [mesh] tensor 2 leaves 24 a rank"),
        (["--mesh.pipe=2", "--train.pipe=1f1v"], "--train.pipe: pipe = '1f1v': there is no schedule '1f1v'. Did you"),
        (["--mesh.context=5", "--train.seq_len=4"], "[train] seq_len = 4 leaves some of [mesh] context 5 ranks without a token"),
    ],
)
def test_a_mesh_that_cannot_cut_the_model_is_refused_with_the_numbers_before_any_rank_starts(file, flags, message):
    with pytest.raises(ConfigError) as caught:
        load_config(file(), ["--model.width=48", *flags])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        (["--train.steps=20", "--schedule.warmup_steps=30"], "--schedule.warmup_steps 20 or less"),
        (["--train.evaluate=false"], "--data.baseline false"),
    ],
)
def test_what_an_error_advises_can_be_followed_to_the_letter(file, flags, cure):
    with pytest.raises(ConfigError) as caught:
        load_config(file(), flags)
    assert cure in str(caught.value)
    load_config(file(), [*flags, *cure.removesuffix(" or less").split()])


def test_logical_shards_and_the_default_vocabulary_are_those_of_engine_and_tokenizer():
    assert checks.LOGICAL_SHARDS == schema.LOGICAL_SHARDS
    assert ByteTokenizer().vocab_size == schema.BYTES_VOCAB


def test_a_tokenizer_that_nobody_has_read_yet_says_nothing_of_the_vocabulary(file):
    """Its size was taken for that of bytes, 257."""
    config = load_config(file(), ["--data.tokenizer=x.json", "--model.vocab_size=128"])
    assert config.gpt(100).vocab_size == 128
    with pytest.raises(ConfigError, match="vocab_size 128 is less than the 200 of the tokenizer"):
        config.gpt(200)
    with pytest.raises(ConfigError, match="vocab_size 128 is less than the 257 of the tokenizer"):
        load_config(file(), ["--model.vocab_size=128"])


def test_a_batch_that_does_not_divide_shows_the_equation_before_any_rank_starts(file):
    with pytest.raises(ConfigError, match=r"local \? x ranks 3 x accumulate \? = global 8 has no solution"):
        load_config(file(), ["--mesh.replicate", "3"])


def test_a_missing_file_names_the_toml_files_beside_it(file):
    file()
    with pytest.raises(ConfigError, match=r"trian.toml: no such file. There: train.toml"):
        load_config("trian.toml")


def test_a_folder_is_not_a_config(file, tmp_path):
    file()
    with pytest.raises(ConfigError, match=r"is a folder; name the TOML file in it. There: train.toml"):
        load_config(tmp_path)


@pytest.mark.parametrize("path", ["a\0b.toml", "train.toml/x.toml"])
def test_a_path_that_cannot_be_opened_is_a_config_error(file, path):
    file()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


def test_a_file_that_is_not_utf_8_names_the_byte(tmp_path):
    (tmp_path / "bad.toml").write_bytes(b"[run]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text .byte 14."):
        load_config(tmp_path / "bad.toml")


def test_a_byte_order_mark_at_the_front_is_no_mistake(file):
    assert load_config(file("\ufeff" + MINIMAL)).train.global_batch_size == 8


def test_brackets_in_brackets_are_a_config_error_too(file):
    with pytest.raises(ConfigError, match="train.toml: not a config: brackets in brackets"):
        load_config(file("x = " + "[" * 5000 + "]" * 5000))


def test_a_written_config_is_read_back_equal(file, tmp_path):
    flags = ["--optimizer.betas", "[0.8, 0.9]", "--train.deterministic", "4", "--run.name", "a", "--model.moe.top_k", "1"]
    config = load_config(file(), flags)
    write_config(config, tmp_path / "out.toml")
    assert load_config(tmp_path / "out.toml") == config
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.toml", "train.toml"], "no temporary file is left"


def test_left_out_replicate_takes_the_ranks_there_are(file):
    config = with_ranks(load_config(file()), 4)
    assert config.mesh.as_mesh().size == 4
    assert config.batch().local == 2


def test_from_stage_1_on_left_out_axes_give_all_ranks_to_shard(file):
    config = with_ranks(load_config(file(), ["--train.stage", "2"]), 4)
    assert config.mesh.as_mesh() == Mesh(shard=4)
    assert config.batch().local == 2


def test_a_given_shard_leaves_the_other_ranks_to_replicate(file):
    config = load_config(file(), ["--train.stage", "3", "--mesh.shard", "2"])
    assert config.mesh.as_mesh() == Mesh(shard=2), "started bare, nobody else was started"
    assert with_ranks(config, 4).mesh.as_mesh() == Mesh(replicate=2, shard=2)
    with pytest.raises(MeshError, match="shard 2 does not divide the 3 ranks"):
        with_ranks(config, 3)


@pytest.mark.parametrize(("flags", "alone"), [
    (["--train.stage=3", "--train.reshard_after_forward=2"], "reshard_after_forward 2 does not divide .mesh. shard 1"),
    (["--mesh.shard=2", "--train.local_batch_size=1", "--train.accumulate=1", "--train.global_batch_size=4"], "1 x 2 x 1 = 2"),
    (["--mesh.shard=2", "--train.stage=2", "--comm.compress=topk"], 'compress = "topk" has no reduce-scatter'),
    (["--train.stage=2", "--comm.compress=topk", "--mesh.expert=2", "--model.moe.experts=4"], None),
], ids=str)
def test_a_file_is_not_judged_by_axes_that_are_left_out_before_the_ranks_are_known(file, flags, alone):
    """It was refused as if replicate were 1, and accepted with the same axes written out."""
    config = load_config(file(), flags)
    whole = with_ranks(config, 4)
    axes = [f"--mesh.{axis}={n}" for axis, n in whole.mesh.as_mesh().sizes().items()]
    assert load_config(file(), [*flags, *axes]) == whole and whole.mesh.as_mesh().size == 4
    if alone:
        with pytest.raises(ConfigError, match=alone):
            with_ranks(config, config.mesh.as_mesh().size)


@pytest.mark.parametrize("shard", [9, 16])
def test_more_ranks_than_logical_shards_are_refused_as_soon_as_shard_says_so(file, shard):
    with pytest.raises(ConfigError, match=f"deterministic has 8 logical shards, which cannot feed {shard} ranks"):
        load_config(file(f"[train]\nglobal_batch_size = {shard}\ndeterministic = true\n"), [f"--mesh.shard={shard}"])


def test_rows_are_dealt_over_the_data_axes_only(file):
    config = with_ranks(load_config(file(), ["--model.preset", "1M", "--mesh.tensor", "2", "--mesh.context", "2", "--train.stage", "3"]), 8)
    assert config.mesh.as_mesh() == Mesh(shard=2, context=2, tensor=2)
    assert config.batch().local == 4
    with pytest.raises(MeshError, match="context 3 does not divide the 8 ranks"):
        with_ranks(load_config(file(), ["--mesh.context", "3"]), 8)


def test_experts_that_do_not_divide_and_an_axis_without_experts_are_told_with_the_arithmetic(file):
    with pytest.raises(ConfigError, match=r"experts = 3 cannot be shared evenly by .mesh. expert 2: 3 / 2 = 1.5 on each rank"):
        load_config(file(), ["--model.moe.experts", "3", "--mesh.expert", "2"])
    with pytest.raises(ConfigError, match=r".mesh. expert 2 spreads experts over ranks, and without .model.moe. there are none"):
        load_config(file(), ["--mesh.expert", "2"])


def test_rows_are_dealt_over_the_expert_axis_too(file):
    config = with_ranks(load_config(file("[train]\nglobal_batch_size = 8\n[model.moe]\n"), ["--mesh.expert", "4"]), 8)
    assert config.mesh.as_mesh() == Mesh(replicate=2, expert=4)
    assert config.batch().local == 1


def test_a_table_of_experts_has_the_keys_and_defaults_of_the_model_s_own_and_can_be_taken_away_again(file):
    config = load_config(file("[train]\nglobal_batch_size = 8\n[model.moe]\nexperts = 4\n"), ["--model.moe.capacity", "1"])
    assert config.gpt(257).moe == MoEConfig(experts=4, capacity=1.0)
    assert load_config("train.toml", ["--model.moe", "none"]).gpt(257).moe is None
    assert load_config(file(), ["--model.moe.experts", "none"]).model.moe is None, "nothing to take away"
    assert [field.name for field in fields(MoEConfig)] == list(schema.MoESection.model_fields)


def test_given_replicate_must_be_the_ranks_there_are(file):
    config = load_config(file(), ["--mesh.replicate", "2"])
    assert with_ranks(config, 2) == config
    with pytest.raises(MeshError, match="needs replicate 2 = 2 ranks, but there are 4"):
        with_ranks(config, 4)


def test_ranks_that_do_not_divide_the_batch_are_refused_when_they_are_known(file):
    with pytest.raises(ConfigError, match=r"on 3 ranks: local . x ranks 3"):
        with_ranks(load_config(file()), 3)


@given(st.lists(st.text(max_size=20), max_size=4))
def test_any_words_are_overrides_or_a_config_error(words):
    try:
        flags = parse_overrides(words)
    except ConfigError:
        return
    assert all(flag.section and flag.key for flag in flags)


@given(
    st.dictionaries(
        st.sampled_from([*Config.model_fields, "x"]),
        st.one_of(st.integers(), st.text(max_size=5), st.dictionaries(st.text(max_size=9), st.integers(), max_size=3)),
    )
)
def test_any_table_is_a_config_or_a_config_error(table):
    try:
        assert isinstance(make_config(table, "here"), Config)
    except ConfigError as error:
        assert str(error), "an error without a word"


def test_reading_a_config_imports_no_torch_and_no_numpy(file):
    code = (
        "import sys; from rankloom.train.run.config import load_config; load_config(sys.argv[1]);"
        "bad = {'torch', 'numpy', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, file()], check=True)


def test_an_engine_needs_no_parser_of_configs():
    """Every rank would hold it: some 10 MiB."""
    code = "import sys, rankloom as rl; rl.prepare, rl.fully_shard, rl.simulate; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
