"""The registry: ids, imports, plug-ins, and the one line each mistake gets."""

import multiprocessing
import subprocess
import sys
import textwrap
from functools import partial

import gymnasium
import pytest

from rollstream import ChatEnv
from rollstream.envs import registry
from rollstream.envs.key_value import KeyValue
from rollstream.errors import ConfigError, EnvError, UnknownEnv

MINE = '''
from rollstream import ChatEnv, register
from helpers_of_mine import GREETING

class Greeter(ChatEnv):
    """Greets."""

    def __init__(self, name="you"):
        self.name = name

    def start(self, task):
        return f"{GREETING} {self.name}"

    def respond(self, message):
        return "hm"

register("mine/Greeter-v0", Greeter, max_turns=2, step_timeout_s=3, kwargs={"name": "them"})
'''


class Echo(ChatEnv):
    def __init__(self, fail: bool = False):
        if fail:
            raise RuntimeError("no server\nat all")

    def start(self, task):
        return "say"

    def respond(self, message):
        return message["content"]


@pytest.fixture(autouse=True)
def _known_ids(monkeypatch):
    """Leaves the registries, the path and the modules as they were."""
    monkeypatch.setattr(registry, "_registrations", dict(registry._registrations))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, modules = dict(gymnasium.registry), set(sys.modules)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "helpers_of_mine.py").write_text("GREETING = 'hello'")
    path = tmp_path / "greeter.py"
    path.write_text(MINE)
    return path


def test_the_built_in_environment_is_known_to_gymnasium_too():
    assert "rollstream/KeyValue-v0" in registry.registered_ids()
    env = gymnasium.make("rollstream/KeyValue-v0", keys="xy")
    assert isinstance(env.unwrapped, KeyValue)
    env.reset(seed=0)
    assert env.step("not a digit")[1] == pytest.approx(-0.1)


@pytest.mark.parametrize("env_id", ["Echo", "Echo-v0", "demo/Echo", "demo/Echo-v", "a/b/Echo-v0", "demo/Ec ho-v1", ""])
def test_an_id_needs_namespace_and_version(env_id):
    with pytest.raises(ConfigError, match="write namespace/Name-vN, for example demo/"):
        registry.register(env_id, Echo)


def test_limits_and_arguments_of_the_registration_reach_the_instance():
    registry.register("demo/Echo-v0", Echo, max_turns=2, step_timeout_s=5, episode_timeout_s=60)
    for env in (registry.make("demo/Echo-v0"), gymnasium.make("demo/Echo-v0").unwrapped):
        assert (env.max_turns, env.step_timeout_s, env.episode_timeout_s) == (2, 5, 60)
    assert Echo.max_turns == ChatEnv.max_turns
    env = registry.make("demo/Echo-v0")
    env.reset()
    env.step("a")
    assert env.step("b")[3] is True


@pytest.mark.parametrize("limit", ["max_turns", "step_timeout_s", "episode_timeout_s"])
def test_a_limit_must_be_positive(limit):
    with pytest.raises(ConfigError, match=f"{limit} is 0; it must be greater than 0"):
        registry.register("demo/Echo-v0", Echo, **{limit: 0})


def test_registering_the_same_class_again_is_fine_and_another_is_not():
    registry.register("demo/Echo-v0", Echo, max_turns=3)
    registry.register("demo/Echo-v0", Echo, max_turns=4)
    assert registry.make("demo/Echo-v0").max_turns == 4
    with pytest.raises(ConfigError, match=r"registered already, by .*Echo; give .*KeyValue another name"):
        registry.register("demo/Echo-v0", KeyValue)
    gymnasium.register("demo/Theirs-v0", entry_point=Echo)
    with pytest.raises(ConfigError, match="registered already, with gymnasium"):
        registry.register("demo/Theirs-v0", Echo)


def test_a_class_that_is_no_conversation_is_refused():
    with pytest.raises(ConfigError, match=r"Env is not a rollstream\.ChatEnv"):
        registry.register("demo/Plain-v0", gymnasium.Env)
    registry.register("demo/Made-v0", partial(dict))
    with pytest.raises(ConfigError, match="made a dict, not a rollstream"):
        registry.make("demo/Made-v0")


def test_an_entry_may_be_a_function_or_a_name():
    registry.register("demo/Function-v0", lambda: Echo())
    registry.register("demo/Named-v0", "rollstream.envs.key_value:KeyValue")
    assert isinstance(registry.make("demo/Function-v0"), Echo)
    assert isinstance(registry.make("demo/Named-v0", keys="ab"), KeyValue)
    with pytest.raises(ConfigError, match="does not name a class"):
        registry.register("demo/Wrong-v0", "rollstream.envs.key_value")
    registry.register("demo/Gone-v0", "rollstream.envs.key_value:Gone")
    with pytest.raises(ConfigError, match=r"demo/Gone-v0: entry .* cannot be imported"):
        registry.make("demo/Gone-v0")


def test_an_unknown_id_names_the_closest_ones_and_how_to_import():
    with pytest.raises(UnknownEnv) as caught:
        registry.make("rollstream/KeyVal-v0")
    assert "did you mean rollstream/KeyValue-v0" in str(caught.value)
    assert "imports:" in str(caught.value)
    with pytest.raises(UnknownEnv, match=r"known are .*rollstream/KeyValue-v0"):
        registry.spec_of("zzz")


def test_arguments_nobody_takes_are_refused_in_one_line():
    with pytest.raises(ConfigError) as caught:
        registry.make("rollstream/KeyValue-v0", kyes="abc")
    assert str(caught.value) == ("env.kwargs of rollstream/KeyValue-v0: got an unexpected keyword argument 'kyes'; it takes keys='abcdefgh'")
    with pytest.raises(ConfigError, match="keys is 'aa'"):
        registry.make("rollstream/KeyValue-v0", keys="aa")


def test_a_constructor_that_raises_is_an_environment_error():
    registry.register("demo/Echo-v0", Echo, kwargs={"fail": True})
    with pytest.raises(EnvError, match=r"^demo/Echo-v0: its constructor raised RuntimeError: no server at all \(test_registry\.py, line \d+\)$"):
        registry.make("demo/Echo-v0")
    assert registry.make("demo/Echo-v0", fail=False).reset()


def test_a_file_is_imported_once_with_its_neighbours(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    registry.load_imports(["greeter.py", str(mine)])
    env = registry.make("mine/Greeter-v0")
    assert env.reset()[0][0]["content"] == "hello them"
    assert registry.spec_of("mine/Greeter-v0").step_timeout_s == 3


def test_a_module_in_the_working_folder_is_found(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    registry.load_imports(["greeter"])
    assert "mine/Greeter-v0" in registry.registered_ids()


def test_an_id_may_name_its_module(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    assert registry.make("greeter:mine/Greeter-v0").reset()[0][0]["content"] == "hello them"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("gone.py", None, "imports: no file gone.py (looked for "),
        ("gone.module", None, "imports: no module 'gone.module'; install it"),
        ("bad.py", "x = 1\ny = z\n", "imports: bad.py failed: name 'z' is not defined (bad.py, line 2)"),
        ("needs.py", "import nowhere_to_be_found\n", "imports: needs.py failed: No module named 'nowhere_to_be_found' (needs.py, line 1)"),
        ("unversioned.py", "from rollstream import register\nregister('a', None)\n", "'a' is not an environment id"),
        ("syntax.py", "def f(:\n", "imports: syntax.py failed: invalid syntax (syntax.py, line 1)"),
        ("empty_key.py", "x = {}\nx['a']\n", "imports: empty_key.py failed: KeyError: 'a' (empty_key.py, line 2)"),
        (
            "leaves.py",
            "import sys\nsys.exit(3)\n",
            "imports: leaves.py called sys.exit(3) (leaves.py, line 2); a file that is imported must not end",
        ),
        ("/tmp", None, "imports: /tmp is a folder; name one file, such as /tmp/my_env.py, or a module"),
        ("some/where", None, "imports: some/where is neither a .py file nor a module"),
    ],
)
def test_an_import_that_fails_gets_one_line(name, text, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            registry.load_imports([name])
        assert error in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "frozen" not in str(caught.value)
        assert str(caught.value).count("line 1") <= 1


def test_a_syntax_error_in_a_module_names_its_own_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outer_module.py").write_text("import inner_module\n")
    (tmp_path / "inner_module.py").write_text("x = 1\ny = (\n")
    with pytest.raises(ConfigError, match=r"^imports: outer_module failed: '\(' was never closed \(inner_module\.py, line 2\)$"):
        registry.load_imports(["outer_module"])


def test_a_spawned_process_finds_everything_again(mine):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(registry.load_imports, ([str(mine)],))
        assert pool.apply(registry.registered_ids) == ["mine/Greeter-v0", "rollstream/KeyValue-v0", "rollstream/WordCount-v0"]
        env = pool.apply(registry.make, ("rollstream/KeyValue-v0",))
    assert env.reset(seed=0)[0][0]["content"].startswith("get ")


def test_installed_packages_offer_environments_and_a_broken_one_costs_a_warning(mine, tmp_path):
    package = tmp_path / "greetings-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[rollstream.envs]\ngreeter = greeter\nbroken = greeter_gone\ncalled = called:register_all\n")
    (tmp_path / "called.py").write_text("import greeter\nfrom rollstream import register\ndef register_all(): register('mine/Called-v1', greeter.Greeter)\n")
    script = """
        from rollstream.envs import registry
        ids = registry.registered_ids()
        assert ids == ["mine/Called-v1", "mine/Greeter-v0", "rollstream/KeyValue-v0", "rollstream/WordCount-v0"]
        assert registry.make("mine/Greeter-v0").reset()[0][0]["content"] == "hello them"
        try:
            registry.make("mine/Gone-v0")
        except registry.UnknownEnv as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "entry point broken failed to import: ModuleNotFoundError" in done.stdout
    assert "plugin=broken state=failed" in done.stderr
