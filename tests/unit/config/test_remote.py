"""The settings of the remote port, whom rules admit there, and which files can be used."""

import os
from pathlib import Path

import pytest
from kvtierd.config import daemon as config
from kvtierd.config.certificates import CertificateError, CertificateFiles
from kvtierd.config.daemon import Config, Loaded
from kvtierd.config.people import everybody_of, tenant_of, tenant_of_remote, tenant_rules
from kvtierd.config.settings import ConfigError
from kvtierd.preflight import Finding, Verdict, examine
from kvtierd.preflight.remote import check_remote
from kvtierd.rpc.certificates import names_in

from tests.support.certificates import CertificateAuthority, CertificateFolder, Issued

LISTEN = {"remote.listen": "127.0.0.1:9472"}


def load(**environ: str) -> Config:
    return config.load(None, dict(LISTEN), environ).config


@pytest.fixture(autouse=True)
def no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "no-such.toml")


@pytest.fixture
def folder(tmp_path: Path) -> CertificateFolder:
    path = tmp_path / "tls"
    path.mkdir()
    return CertificateFolder(path)


def files(folder: CertificateFolder) -> CertificateFiles:
    return CertificateFiles(*(folder.folder / name for name in ("tls.crt", "tls.key", "ca.crt")))


class TestSettings:
    def test_by_default_nobody_listens(self) -> None:
        assert not config.load(None, {}, {}).config.remote.on

    def test_tls_takes_three_files(self) -> None:
        with pytest.raises(ConfigError) as error:
            load(KVTIER_REMOTE_KEY="/a")
        assert [each.field for each in error.value.all] == ["remote.certificate", "remote.client_ca"]
        assert "name a PEM file, or set remote.insecure" in str(error.value)

    def test_without_tls_there_are_none(self) -> None:
        found = load(KVTIER_REMOTE_INSECURE="true").remote
        assert (found.on, found.files) == (True, None)
        with pytest.raises(ConfigError) as error:
            load(KVTIER_REMOTE_INSECURE="true", KVTIER_REMOTE_KEY="/a")
        assert error.value.field == "remote.insecure"

    def test_a_mistake_in_one_of_them_is_told_once(self) -> None:
        with pytest.raises(ConfigError) as error:
            load(KVTIER_REMOTE_INSECURE="perhaps")
        assert [each.field for each in error.value.all] == ["remote.insecure"]


class TestRules:
    RULES = tenant_rules("cert:spiffe://a/router=one,cert:b.example=uid:7,anonymous=open,*=everybody")

    def test_they_are_written_as_they_were_read(self) -> None:
        assert tenant_rules(",".join(map(str, self.RULES))) == self.RULES

    @pytest.mark.parametrize(
        ("names", "tenant"),
        [
            (["spiffe://a/router"], "one"),
            (["b.example"], "uid:7"),
            (["c.example", "b.example"], "uid:7"),
            (["c.example"], None),
            (["B.example"], None),
            (["*"], None),
            (["anonymous"], None),
            ([], None),
            ([""], None),
            (None, "open"),
        ],
    )
    def test_the_first_that_names_a_caller_counts(self, names: list[str] | None, tenant: str | None) -> None:
        assert tenant_of_remote(self.RULES, names) == tenant

    def test_processes_of_this_host_are_not_meant(self) -> None:
        assert tenant_of(self.RULES, 7, {7}) == "everybody"
        assert tenant_of_remote(tenant_rules("*=everybody,uid:0=root"), None) is None
        assert tenant_of_remote(tenant_rules("*=everybody,uid:0=root"), ["root"]) is None

    @pytest.mark.parametrize(
        "wrong", ["cert:=a", "cert=a", "cert:a", "cert:a=uid:x", "cert:a=uid:", "uid:1=uid:2"]
    )
    def test_what_is_no_rule_is_refused(self, wrong: str) -> None:
        with pytest.raises(ValueError):
            tenant_rules(wrong)

    @pytest.mark.parametrize("caller", ["cert:a", "anonymous"])
    def test_nobody_orders_from_elsewhere(self, caller: str) -> None:
        with pytest.raises(ValueError, match="only read"):
            everybody_of(caller)


def test_a_common_name_counts_only_where_there_is_no_other() -> None:
    context = {
        "x509_common_name": [b"cn"],
        "peer_uri": [b"spiffe://a"],
        "peer_dns": [b"a.example", b"b.example"],
    }
    assert names_in(context) == ["spiffe://a", "a.example", "b.example"]
    assert names_in({"x509_common_name": [b"cn"]}) == ["cn"]
    assert names_in({}) == []


class TestFiles:
    def test_what_fits_is_read(self, folder: CertificateFolder) -> None:
        authority = CertificateAuthority()
        own = authority.issue("host")
        folder.put(own, authority.pem)
        found, state = files(folder).read()
        assert (found.certificate, found.key, found.client_ca) == (own.certificate, own.key, authority.pem)
        assert state == files(folder).states()
        folder.put(own, authority.pem)
        assert state != files(folder).states()

    def test_what_does_not_fit_is_refused(self, folder: CertificateFolder) -> None:
        authority = CertificateAuthority()
        own, other = authority.issue("host"), authority.issue("host")
        for certificate, key, ca, field in (
            (own.certificate, other.key, authority.pem, "remote.key"),
            (own.certificate, b"", authority.pem, "remote.key"),
            (b"", own.key, authority.pem, "remote.certificate"),
            (own.certificate[:-100], own.key, authority.pem, "remote.certificate"),
            (own.certificate, own.key, b"", "remote.client_ca"),
            (own.certificate, own.key, own.key, "remote.client_ca"),
            (own.certificate, own.key, "ä".encode(), "remote.client_ca"),
            (own.certificate + bytes(1 << 20), own.key, authority.pem, "remote.certificate"),
        ):
            folder.put(Issued(certificate, key), ca)
            with pytest.raises(CertificateError) as error:
                files(folder).read()
            assert error.value.field == field

    def test_a_missing_file_and_one_that_is_none_are_refused(self, folder: CertificateFolder) -> None:
        assert files(folder).states() == (None, None, None)
        with pytest.raises(CertificateError, match="No such file"):
            files(folder).read()
        authority = CertificateAuthority()
        folder.put(authority.issue("host"), authority.pem)
        os.mkfifo(folder.folder / "pipe")
        with pytest.raises(CertificateError, match="is no file"):
            CertificateFiles(
                folder.folder / "pipe", folder.folder / "tls.key", folder.folder / "ca.crt"
            ).read()

    @pytest.mark.parametrize(
        ("mode", "owner", "daemon", "well"),
        [
            (0o600, 7, 7, True),
            (0o400, 7, 7, True),
            (0o640, 7, 7, False),
            (0o604, 7, 7, False),
            (0o600, 8, 7, False),
            (0o640, 0, 7, True),
            (0o440, 0, 7, True),
            (0o660, 0, 7, False),
            (0o644, 0, 7, False),
            (0o600, 0, 0, True),
            (0o640, 0, 0, False),
        ],
    )
    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_a_key_is_secret(
        self,
        folder: CertificateFolder,
        monkeypatch: pytest.MonkeyPatch,
        mode: int,
        owner: int,
        daemon: int,
        well: bool,
    ) -> None:
        authority = CertificateAuthority()
        folder.put(authority.issue("host"), authority.pem, key_mode=mode)
        os.chown(folder.folder / "tls.key", owner, 7)
        monkeypatch.setattr(os, "geteuid", lambda: daemon)
        if well:
            files(folder).read()
            return
        with pytest.raises(CertificateError, match=r"chmod 0|chown") as error:
            files(folder).read()
        assert error.value.field == "remote.key"


class TestPreflight:
    def findings(self, folder: CertificateFolder, **flags: object) -> dict[str, Finding]:
        given: dict[str, object] = dict(LISTEN)
        given |= {key.replace("__", "."): str(value) for key, value in flags.items()}
        loaded: Loaded = config.load(None, given, {})
        return {each.name: each for each in examine(loaded, may_run=False, checks=(check_remote,))}

    def test_it_says_what_is_well(self, folder: CertificateFolder) -> None:
        authority = CertificateAuthority()
        folder.put(authority.issue("host"), authority.pem)
        found = self.findings(folder, server__tenants="cert:a=b,anonymous=c", **folder.settings)
        assert {each.verdict for each in found.values()} == {Verdict.OK}
        assert found["remote callers"].found == "cert:a=b"

    def test_it_says_what_is_not(self, folder: CertificateFolder) -> None:
        authority = CertificateAuthority()
        folder.put(authority.issue("host"), authority.pem, key_mode=0o644)
        found = self.findings(folder, server__tenants="*=b", **folder.settings)
        tls, callers = found["remote TLS"], found["remote callers"]
        assert (tls.verdict, tls.field, tls.remedy) == (Verdict.FAILURE, "remote.key", "chmod 0600")
        assert (callers.verdict, callers.field) == (Verdict.WARNING, "server.tenants")

    def test_it_warns_where_there_is_no_tls(self, folder: CertificateFolder) -> None:
        found = self.findings(folder, remote__insecure="true", server__tenants="cert:a=b")
        assert found["remote TLS"].verdict is Verdict.WARNING
        assert found["remote callers"].verdict is Verdict.WARNING
        well = self.findings(folder, remote__insecure="true", server__tenants="anonymous=b")
        assert well["remote callers"].verdict is Verdict.OK

    def test_what_is_off_is_not_looked_at(self, folder: CertificateFolder) -> None:
        loaded = config.load(None, {}, {})
        assert examine(loaded, may_run=False, checks=(check_remote,)) == []
