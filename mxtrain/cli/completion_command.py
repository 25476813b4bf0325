"""``mxtrain completion``: a script with which a shell completes commands, settings, presets and files."""

import argparse
from shlex import quote

from mxtrain.config import presets

SHELLS = ("bash", "zsh")
WITH_SETTINGS = ("train", "prepare")
WITH_PRESETS = (*WITH_SETTINGS, "init")

# zsh runs bash's completion functions. "words" and "current" would be variables of zsh's own completion.
ZSH = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""

SCRIPT = """\
_mxtrain() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" candidates=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        candidates={commands}
    elif [ "${{word#-}}" != "$word" ]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
        esac
    fi
    local newline=$'\n'  # in double quotes zsh would not read $'' as a newline
    local IFS="$newline"
    COMPREPLY=($(compgen -W "${{candidates// /$newline}}" -- "$word"))
    if [ "$COMP_CWORD" -gt 1 ] && [ "${{word#-}}" = "$word" ]; then
        COMPREPLY+=($(compgen -f -- "$word"))
        compopt -o filenames 2>/dev/null || true
    fi
}}
complete -F _mxtrain mxtrain
"""


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands in bash or zsh",
        description="""\
Print a script that lets the Tab key complete commands, all settings, the values of settings that have few, presets and
files. Keep the script, which takes seconds to make, and source it in ~/.bashrc or ~/.zshrc:

  mxtrain completion bash > ~/.mxtrain-completion
  echo "source ~/.mxtrain-completion" >> ~/.bashrc
""",
    )
    parser.set_defaults(run=lambda options: _print(options.shell, commands.choices))
    parser.add_argument("shell", choices=SHELLS)


def _print(shell: str, parsers: dict[str, argparse.ArgumentParser]) -> int:
    print((ZSH if shell == "zsh" else "") + completion_script(parsers), end="")
    return 0


def completion_script(parsers: dict[str, argparse.ArgumentParser]) -> str:
    """Return the script for bash: command -> its options, and option -> its values."""
    from mxtrain.settings.known import known_fields  # takes time

    known = known_fields()
    settings = [flag for field in known.values() for flag in field.flags]
    options, values = [], []
    for name, parser in parsers.items():
        own = list(parser._option_string_actions)
        options.append(_case(name, own + (settings if name in WITH_SETTINGS else [])))
    for name in WITH_SETTINGS:
        values += [_case(f"{name} --{f.name}", list(f.choices)) for f in known.values() if f.choices]
    values += [_case(f"{name} {name}", list(presets())) for name in WITH_PRESETS]
    values += [_case(before, list(presets())) for before in ("doctor --model", "import --config")]
    values.append(_case("completion completion", list(SHELLS)))
    return SCRIPT.format(commands=quote(" ".join(parsers)), options="\n".join(options), values="\n".join(values))


def _case(pattern: str, candidates: list[str]) -> str:
    return f"            {quote(pattern)}) candidates={quote(' '.join(candidates))} ;;"
