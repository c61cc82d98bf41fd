"""The small socket by which an operator reaches any running cache; `docs/spec/control.md` is its protocol."""
