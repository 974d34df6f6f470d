"""The only places that know the names of upstream projects."""
