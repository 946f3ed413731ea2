# Every recipe of the repository as a Nix derivation, over the pinned tree; needs no nixpkgs.
#
# Promise: data decide, the same as for the other drivers: recipe.toml, sources.toml and
# environment.toml are read here.  Tree and sources are store paths named by their sha256, as
# requireFile does it: they are in the store already, or the build says which command adds them.
# Limit: x86-64 Linux; needs a Nix whose sandbox lets a builder make user namespaces (not so where
# Nix itself runs in a plain chroot).
#
# root     the checkout
# trees    tree -> sha256 of its archive (a Docker image's layer, the same digest)
# busybox  sha256 of the NAR of a directory that holds the tree's busybox
# given    artifact -> store path that is used instead of building it
# setting  see Setting of recipe.py; env is added to that of every build
{
  root,
  trees,
  busybox,
  given ? { },
  setting ? { },
}:
let
  inherit (builtins)
    attrNames
    attrValues
    concatMap
    concatStringsSep
    elemAt
    filter
    fromTOML
    head
    listToAttrs
    map
    mapAttrs
    match
    pathExists
    readDir
    readFile
    replaceStrings
    ;
  system = "x86_64-linux";
  directory = setting.directory or "/build";
  sources = fromTOML (readFile (root + "/toolchain/sources.toml"));
  environment = fromTOML (readFile (root + "/toolchain/environment.toml"));

  # A store path by its hash.  nix-store --add-fixed makes the same path, which is then not built.
  required =
    {
      name,
      sha256,
      mode ? "flat",
    }:
    derivation {
      inherit name system;
      builder = "/bin/sh";
      args = [
        "-c"
        "echo 'error: ${name} is not in the Nix store: run ./inv fetch --nix' >&2; exit 1"
      ];
      outputHashAlgo = "sha256";
      outputHashMode = mode;
      outputHash = sha256;
      preferLocalBuild = true;
      allowSubstitutes = false;
    };

  box = "${
    required {
      name = "bananaos-busybox";
      sha256 = busybox;
      mode = "recursive";
    }
  }/busybox";

  archives = mapAttrs (
    name: sha256:
    required {
      name = "bananaos-tree-${name}.tar";
      inherit sha256;
    }
  ) trees;

  tree = derivation {
    name = "bananaos-tree-build";
    inherit system;
    builder = box;
    args = [
      "sh"
      "-euc"
      "mkdir $out; exec tar -x -f ${archives.build} -C $out"
    ];
  };

  file = path: builtins.path {
    path = root + path;
    name = replaceStrings [ "/" "[" "]" "*" ] [ "-" "_" "_" "_" ] (baseNameOf path);
  };

  rooms = filter (name: pathExists (root + "/${name}/recipe.toml")) (attrNames (readDir root));

  # All files below a directory of a room, whose name ends with a slash.
  walk =
    room: below:
    let
      entries = readDir (root + "/${room}/${below}");
      one =
        name:
        if entries.${name} == "directory" then walk room "${below}${name}/" else [ "${below}${name}" ];
    in
    concatMap one (attrNames entries);

  # A pattern of pathlib as the files it stands for: names below the room.  In names * and [..];
  # **/ before the last part is any depth.
  expand =
    room: pattern:
    let
      parts = match "(.*/)?([^/]*)" pattern;
      below = if head parts == null then "" else head parts;
      deep = match "(.*/)[*][*]/" below;
      regex = replaceStrings [ "." "*" ] [ "\\." "[^/]*" ] (elemAt parts 1);
      here = map (name: "${below}${name}") (attrNames (readDir (root + "/${room}/${below}")));
      names = if deep == null then here else walk room (head deep);
    in
    filter (name: match regex (baseNameOf name) != null) names;

  # "../kernel/x" of a room is /kernel/x inside: /recipe is one level below the root.
  inside =
    name: if match "\\.\\./.*" name != null then "/${elemAt (match "\\.\\./(.*)" name) 0}" else "/recipe/${name}";

  line = from: to: "ro\t${from}\t${to}\n";

  artifact =
    room: name: recipe:
    let
      all = "${room}/${name}";
      files = concatMap (expand room) ([ recipe.script ] ++ recipe.inputs or [ ]);
      env = environment // recipe.env or { } // setting.env or { };
    in
    given.${all} or (derivation {
      name = "bananaos-${replaceStrings [ "/" ] [ "-" ] all}";
      inherit system;
      builder = box;
      args = [
        "sh"
        (file "/toolchain/nix_builder.sh")
        box
        (file "/toolchain/enter.sh")
        tree
        directory
        recipe.script
        name
      ]
      ++ attrValues (mapAttrs (key: value: "${key}=${value}") env);
      mounts = concatStringsSep "" (
        map (name: line (file "/${room}/${name}") (inside name)) files
        ++ map (name: line (source name) "/src/${name}") (recipe.sources or [ ])
        ++ map (name: line artifacts.${name} "/in/${name}") (recipe.needs or [ ])
        ++ attrValues (mapAttrs (to: from: line (builtins.storePath from) to) (setting.binds or { }))
      );
      archives = concatStringsSep "" (
        map (name: "${archives.${name}} ${name}\n") (recipe.trees or [ ])
      );
      jobs = setting.jobs or "";
      # Another value is another build: a stored result is no rebuild.
      salt = setting.salt or "";
    });

  source =
    name:
    required {
      name = "bananaos-source-${name}";
      inherit (sources.${name}) sha256;
    };

  artifacts = listToAttrs (
    concatMap (
      room:
      attrValues (
        mapAttrs (name: recipe: {
          name = "${room}/${name}";
          value = artifact room name recipe;
        }) (fromTOML (readFile (root + "/${room}/recipe.toml")))
      )
    ) rooms
  );

  # A directory of links: name -> artifact.
  collect =
    of:
    derivation {
      name = "bananaos-artifacts";
      inherit system;
      builder = box;
      args = [
        "sh"
        "-euc"
        (
          "mkdir $out\n"
          + concatStringsSep "" (
            attrValues (
              mapAttrs (name: path: "ln -s ${path} $out/${replaceStrings [ "/" ] [ "-" ] name}\n") of
            )
          )
        )
      ];
    };
in
artifacts // { inherit collect; }
