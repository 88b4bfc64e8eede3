"""The configuration: precedence of sources, and refusals by name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gpumux import config
from gpumux.config import Config, load
from gpumux.errors import ConfigError


def written(tmp_path, text):
    path = tmp_path / "gpumux.toml"
    path.write_text(text)
    return path


def test_defaults_stand_alone():
    assert load({}, {}) == Config()


def test_each_source_beats_the_one_below(tmp_path):
    path = written(
        tmp_path, "[daemon]\ngpu = 1\nthreads = 1\npolicy = 'fifo'\nmetrics_port = 1\n[limits]\nmax_jobs = 7\n"
    )
    environ = {"GPUMUX_THREADS": "2", "GPUMUX_POLICY": "streams", "GPUMUX_METRICS_PORT": "2", "HOME": "/nowhere"}
    got = load({"policy": "paced", "metrics_port": "3", "device": None}, environ, path)
    assert (got.gpu, got.threads, got.policy, got.metrics_port, got.max_jobs) == (1, 2, "paced", 3, 7)


@pytest.mark.parametrize(
    ("flags", "environ", "text", "device"),
    [
        ({}, {}, "", "auto"),
        ({"gpu": "0"}, {}, "", "cuda"),
        ({}, {"GPUMUX_GPU": "0"}, "", "cuda"),
        ({}, {}, "gpu = 0", "cuda"),
        ({"gpu": "0"}, {}, "device = 'auto'", "cuda"),
        ({"gpu": "1"}, {}, "device = 'cpu'", "cpu"),
        ({"gpu": "1"}, {"GPUMUX_DEVICE": "sim"}, "", "sim"),
    ],
)
def test_naming_a_gpu_means_a_gpu_unless_another_device_is_named(flags, environ, text, device, tmp_path):
    assert load(flags, environ, written(tmp_path, f"[daemon]\n{text}\n")).device == device


def test_the_environment_names_the_file_and_an_argument_beats_it(tmp_path):
    path = written(tmp_path, "[daemon]\ngpu = 3\n")
    assert load({}, {"GPUMUX_CONFIG": str(path)}).gpu == 3
    other = tmp_path / "other.toml"
    other.write_text("[daemon]\ngpu = 4\n")
    assert load({}, {"GPUMUX_CONFIG": str(path)}, other).gpu == 4


@pytest.mark.parametrize(
    ("text", "names", "remedy"),
    [
        ("[daemon]\npolcy = 'fifo'\n", "polcy", "policy"),
        ("[limts]\nmax_jobs = 1\n", "limts", "limits"),
        ("gpu = 1\n", "gpu", "[daemon]"),
        ("[daemon]\nmax_jobs = 1\n", "max_jobs", "[limits]"),
        ("[daemon]\ngpu = 'one'\n", "gpu", "whole number"),
        ("[daemon]\ngpu = true\n", "gpu", "whole number"),
        ("[daemon]\ngpu = 1.5\n", "gpu", "whole number"),
        ("[daemon]\ngpu = -1\n", "gpu", "between 0 and"),
        ("[daemon]\nheartbeat_s = nan\n", "heartbeat_s", "between"),
        ("[daemon]\npolicy = 'pacd'\n", "policy", "paced"),
        ("[daemon]\nstate_dir = 3\n", "state_dir", "quotes"),
        ("[daemon]\nendpoint = 'http://x'\n", "http://x", "ipc://"),
        ("[daemon]\nendpoint = [1]\n", "endpoint", "["),
        ("[limits]\nmax_message_bytes = 1\n", "max_message_bytes", "between"),
        ("[daemon]\nheartbeat_s = 9.0\n", "lease_s", "heartbeat_s"),
        ("[daemon]\nendpoint = 'tcp://*:1'\n", "tcp://", "curve_secret_key"),
        ("[daemon\n", "TOML", "mend"),
        ("[access]\nallow_ops = ['rm -rf']\n", "'rm -rf'", "aten.add.Tensor"),
        ("[access]\nallow_ops = ['aten.add']\n", "'aten.add'", "aten.add.Tensor"),
    ],
)
def test_a_wrong_file_is_refused_by_name_with_a_remedy(tmp_path, text, names, remedy):
    with pytest.raises(ConfigError) as caught:
        load({}, {}, written(tmp_path, text))
    assert names in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("table", config.TABLES)
def test_a_key_like_no_other_gets_the_list_of_its_own_table(tmp_path, table):
    with pytest.raises(ConfigError) as caught:
        load({}, {}, written(tmp_path, f"[{table}]\nzzz = 1\n"))
    assert {f.name for f in fields(Config) if f.metadata["table"] == table} == set(
        caught.value.remedy.removeprefix(f"[{table}] has: ").split(", ")
    )


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load({}, {}, tmp_path / "nothing.toml")


def test_an_unknown_variable_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"GPUMUX_POLICI.*GPUMUX_POLICY"):
        load({}, {"GPUMUX_POLICI": "fifo"})


def test_a_bad_variable_and_a_bad_flag_are_refused_by_name():
    with pytest.raises(ConfigError, match="GPUMUX_THREADS"):
        load({}, {"GPUMUX_THREADS": "many"})
    with pytest.raises(ConfigError, match="--metrics-port"):
        load({"metrics_port": "70000"}, {})
    with pytest.raises(ConfigError, match="--colour"):
        load({"colour": "red"}, {})


@pytest.mark.parametrize("value", ["off", "-1"])
def test_metrics_can_be_switched_off(value):
    assert load({"metrics_port": value}, {}).metrics_port == -1
    assert load({}, {"GPUMUX_METRICS_PORT": value}).metrics_port == -1


def test_lists_are_written_with_commas_outside_the_file(tmp_path):
    assert load({}, {"GPUMUX_ALLOW_OPS": "a.b.c, d.e.f"}).allow_ops == ("a.b.c", "d.e.f")
    assert load({}, {}, written(tmp_path, "[access]\nallow_ops = ['a.b.c']\n")).allow_ops == ("a.b.c",)
    assert load({"endpoint": ["ipc:///a", "ipc:///b"]}, {}).endpoint == ("ipc:///a", "ipc:///b")


def test_variables_for_clients_are_no_settings():
    environ = {"GPUMUX_TRACEBACK": "full", "GPUMUX_CLUSTER": "auto", "GPUMUX_CURVE_KEY": "key"}
    assert load({}, environ) == load({}, {})


def test_users_whose_jobs_run_as_one_are_sets_of_names_and_numbers(tmp_path):
    told = load({}, {}, written(tmp_path, "[fusion]\nfuse_together = ['root 7', '1000 1001 1002']\n"))
    assert config.users_together(told.fuse_together) == (frozenset({0, 7}), frozenset({1000, 1001, 1002}))
    assert load({}, {"GPUMUX_FUSE_TOGETHER": "root 7, 8 9"}).fuse_together == ("root 7", "8 9")


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ("['root']", "one user"),
        ("['']", "one user"),
        ("['root 7', '8 7']", "user 7 is in two sets"),
        ("['root nobody-of-that-name']", "no user"),
    ],
)
def test_sets_of_users_that_can_not_be_are_refused(tmp_path, sets, says):
    with pytest.raises(ConfigError, match=rf"fuse_together.*{says}"):
        load({}, {}, written(tmp_path, f"[fusion]\nfuse_together = {sets}\n"))


def test_every_default_passes_its_own_check():
    for spec in fields(Config):
        assert config._check(spec, spec.default, spec.name) == spec.default


def test_tables_are_the_documented_ones():
    assert {spec.metadata["table"] for spec in fields(Config)} == set(config.TABLES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"GPUMUX_GRANTS": "/run/grants"}, "belong together"),
        ({"GPUMUX_GRANTS_ENDPOINT": "ipc:///run/x"}, "belong together"),
        ({"GPUMUX_GRANTS": "/run/grants", "GPUMUX_GRANTS_ENDPOINT": "tcp://127.0.0.1:7"}, "not on this machine"),
    ],
)
def test_grants_have_a_directory_and_an_endpoint_of_this_machine(settings, says):
    with pytest.raises(ConfigError, match=says) as error:
        load({}, settings)
    assert error.value.remedy
    load({}, {"GPUMUX_GRANTS": "/run/grants", "GPUMUX_GRANTS_ENDPOINT": "ipc:///run/x", "GPUMUX_GRANT": "a.token"})
