import pytest

from mxtrain.config import dump_config, find_setting, load_config
from mxtrain.errors import ConfigError
from mxtrain.settings.read import read_settings


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_tables_merge_at_every_depth_and_other_values_are_replaced(write):
    base = '[model]\nname = "llama3"\nconverters = ["mxnorm", "other"]\n[training]\nsteps = 3\n'
    base += "[training.dataloader]\nnum_workers = 1\npin_memory = true\n"
    read = {
        "model": {"name": "llama3", "converters": ["mxnorm", "other"]},
        "training": {"steps": 3, "dataloader": {"num_workers": 1, "pin_memory": True}},
    }
    assert load_config(write("base.toml", base)) == read
    own = 'extends = "base.toml"\n[model]\nconverters = []\n[training.dataloader]\nnum_workers = 2\n[mxnorm]\np = 1\n'
    read["model"]["converters"], read["training"]["dataloader"]["num_workers"] = [], 2
    assert load_config(write("variant.toml", own)) == {**read, "mxnorm": {"p": 1}}


def test_extends_is_relative_to_its_file_and_the_nearest_value_wins(write, monkeypatch, tmp_path):
    write("a.toml", "[x]\na = 1\nb = 1\nc = 1\n")
    write("sub/b.toml", 'extends = "../a.toml"\n[x]\nb = 2\nc = 2\n')
    path = write("c.toml", 'extends = "sub/b.toml"\n[x]\nc = 3\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_config(path) == {"x": {"a": 1, "b": 2, "c": 3}}


def test_a_limit_on_the_text_does_not_apply_to_another_dataset(write):
    write("base.toml", '[training]\ndataset = "python"\n[data]\nmax_bytes = 8\nseed = 1\n')
    for own, data in (
        ('[training]\ndataset = "files"\n', {"seed": 1, "max_bytes": 0}),
        ('[training]\ndataset = "files"\n[data]\nmax_bytes = 9\n', {"seed": 1, "max_bytes": 9}),
        ('[training]\ndataset = "python"\n', {"seed": 1, "max_bytes": 8}),
        ("[training]\nsteps = 3\n", {"seed": 1, "max_bytes": 8}),
    ):
        path = write("own.toml", 'extends = "base.toml"\n' + own)
        assert load_config(path)["data"] == data
    by_flag = read_settings([f"--job.config_file={path}", "--training.dataset=files"])
    assert by_flag["data.max_bytes"] == 0 and by_flag["data.seed"] == 1
    assert read_settings([f"--job.config_file={path}", "--training.dataset=python"])["data.max_bytes"] == 8


def test_a_table_and_another_value_replace_each_other(write):
    write("base.toml", "x = 1\n[y]\na = 1\n")
    path = write("over.toml", 'extends = "base.toml"\ny = 2\n[x]\na = 1\n')
    assert load_config(path) == {"x": {"a": 1}, "y": 2}


def test_a_circle_of_extends_names_its_files(write):
    write("a.toml", 'extends = "b.toml"\n')
    write("b.toml", 'extends = "c.toml"\n')
    write("c.toml", 'extends = "./b.toml"\n')
    with pytest.raises(ConfigError, match=r"circle: '[^']*b.toml' extends '[^']*c.toml' extends '[^']*b.toml'; "):
        load_config(write("a.toml", 'extends = "b.toml"\n'))
    with pytest.raises(ConfigError, match="extend each other in a circle"):
        load_config(write("self.toml", 'extends = "self.toml"\n'))
    with pytest.raises(ConfigError, match="extend each other in a circle"):
        load_config(write("sub/spelled_differently.toml", 'extends = "../sub/spelled_differently.toml"\n'))


def test_the_search_for_a_setting_ends_in_a_circle_of_extends(write):
    path = write("a.toml", 'extends = "b.toml"\n')
    write("b.toml", 'extends = "./a.toml"\n[training]\nsteps = 3\n')
    assert find_setting("configs", path) is None
    assert find_setting("training.steps", path) == (path.parent / "b.toml", 3)


def test_the_search_for_a_setting_counts_the_tables_of_an_array(write):
    path = write("a.toml", "[[s.x]]\na = 1\n[[s.x]] # second\nb = 2\na = 3\n[t]\ny = [{a = 1}, {a = 2}]\n")
    lines = {"s.x": 1, "s.x[0].a": 2, "s.x[1]": 3, "s.x[1].a": 5, "t.y": 7, "t.y[1].a": 7}
    assert {name: find_setting(name, path) for name in lines} == {name: (path, line) for name, line in lines.items()}
    assert find_setting("s.x[2]", path) is None


def test_a_file_may_begin_with_a_byte_order_mark_and_have_crlf_line_ends(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbfx = 1\r\ny = 2\r\n")
    assert load_config(path) == {"x": 1, "y": 2} and find_setting("x", path) == (path, 1)


def test_a_missing_file_is_named_with_the_file_that_extends_it(write, tmp_path):
    with pytest.raises(ConfigError, match=r"config '.*nowhere.toml' does not exist; 'mxtrain configs' lists"):
        load_config(tmp_path / "nowhere.toml")
    path = write("a.toml", 'extends = "gone.toml"\n')
    with pytest.raises(ConfigError, match=r"gone.toml' \(which '.*a.toml' extends\) does not exist; "):
        load_config(path)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("[training\nsteps = 1\n", r"is not valid TOML: .*line 1, column"),
        ('extends = ["a.toml"]\n', r"extends = \['a.toml'\] in .* is not a string"),
    ],
)
def test_broken_files_are_config_errors(write, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_config(write("broken.toml", text))


@pytest.mark.parametrize(
    "file, way_on",
    [
        (
            "config.toml",
            "; write '{0}/config.toml' for the run's settings, or 'mxtrain train --resume' to continue the run",
        ),
        (
            "config.json",
            " with a Hugging Face model; 'mxtrain import MODEL_DIR RUN_DIR' makes a run with a config.toml from it",
        ),
        ("notes.txt", "; name a TOML file or a preset"),
    ],
)
def test_a_folder_is_named_for_what_it_holds(write, tmp_path, file, way_on):
    write(f"a folder/{file}", "")
    folder = tmp_path / "a folder"
    with pytest.raises(ConfigError) as error:
        load_config(folder)
    assert str(error.value) == f"config '{folder}' is a folder" + way_on.format(folder)


def test_unreadable_paths_are_config_errors(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load_config(tmp_path / "a" / "b.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"x = '\xff'\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(binary)


def test_dump_and_load_are_inverse(tmp_path):
    config = {"model": {"name": "é", "converters": ["mxnorm"]}, "mxnorm": {"p": 2, "eps": 1e-5, "nested": {"on": True}}}
    dump_config(config, tmp_path / "out.toml")
    assert load_config(tmp_path / "out.toml") == config


def test_a_full_disk_leaves_the_old_settings(tmp_path, full_disk):
    dump_config({"mxnorm": {"p": 1}}, tmp_path / "out.toml")
    with full_disk(4), pytest.raises(OSError, match="File too large"):
        dump_config({"mxnorm": {"p": 2}}, tmp_path / "out.toml")
    assert load_config(tmp_path / "out.toml") == {"mxnorm": {"p": 1}}
