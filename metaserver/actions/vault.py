"""Core. Encrypts passwords of databases before they are stored, with a key that the database does not hold."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from qmq.errors import OperatorError

MAKE_KEY = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'


class Vault:
    """Made by main from the setting `password_keys`; the first key encrypts, every key decrypts."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None

    @property
    def is_open(self) -> bool:
        return self._fernet is not None

    def encrypt(self, secret: str) -> str:
        """Return what may be stored. Raises OperatorError without a key."""
        if self._fernet is None:
            raise OperatorError(
                "no key to encrypt passwords with: give all metaservers the same one in the setting password_keys, or "
                f"the variable QMQ_METASERVER_PASSWORD_KEYS, then start them again. This makes a key: {MAKE_KEY}"
            )
        return self._fernet.encrypt(secret.encode()).decode()

    def decrypt(self, stored: str) -> str:
        """Return the secret. Raises OperatorError when none of the keys made it."""
        if self._fernet is None:
            raise OperatorError("no key to decrypt passwords with: the setting password_keys is empty")
        try:
            return self._fernet.decrypt(stored.encode()).decode()
        except InvalidToken:
            raise OperatorError(
                "no key of the setting password_keys fits this password; AddDb stores it anew"
            ) from None
