"""How the types and shapes of kexpfam's annotations are checked in every test run; users pay nothing for it."""

from beartype import BeartypeConf, beartype

# An int is good enough where a float is wanted, as in PEP 484.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
