# The artifacts over the pinned tree, for `nix build .#NAME`; no inputs, so nothing to lock or fetch.
# `./inv fetch --nix` puts the tree and the sources into the store first; docs/bytes.md tells more.
{
  description = "bananaOS artifact: kernel, instruments, scheduler and llama-server, byte for byte";

  outputs =
    { self }:
    let
      expected = builtins.fromJSON (builtins.readFile ./artifact/expected/binaries.json);
      artifacts = import ./toolchain/artifacts.nix {
        root = ./.;
        trees = builtins.mapAttrs (_: tree: tree.layer_sha256) expected.trees;
        busybox = expected.busybox_nar_sha256;
      };
      board = {
        inherit (artifacts)
          "board/agent"
          "board/burn"
          "board/bystander"
          "board/initramfs"
          "board/initramfs-ssh"
          "board/quantum"
          "kernel/rvv-probe"
          "kernel/truth"
          ;
      };
      named = {
        kernel = artifacts."kernel/image";
        vstate-profiler = artifacts."kernel/vstate-profiler";
        vstate-observer = artifacts."kernel/vstate-observer";
        scx-vstate = artifacts."sched_ext/scx-vstate";
        llama-server = artifacts."llama.cpp/server-riscv64";
        llama-server-x86 = artifacts."llama.cpp/server-x86-64";
      };
      # All in one directory: NAME -> what its build left.
      board-artifacts = artifacts.collect (
        board // builtins.removeAttrs named [ "llama-server-x86" ]
      );
    in
    {
      packages.x86_64-linux = named // {
        inherit board-artifacts;
        default = board-artifacts;
      };
      # Each by its full name: nix build '.#"kernel/truth"'.
      legacyPackages.x86_64-linux = builtins.removeAttrs artifacts [ "collect" ];
      # What is cheap: `nix flake check` builds these.
      checks.x86_64-linux = {
        rvv-probe = artifacts."kernel/rvv-probe";
        agent = artifacts."board/agent";
      };
    };
}
