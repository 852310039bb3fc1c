"""Lists the words that animal names are made of. Changing them renames every peer."""

# ruff: noqa: SIM905

ADJECTIVES = tuple(
    """
    able agile alert amiable ample ardent artful avid awake balmy bold brave breezy bright brisk busy
    calm candid careful cheery civil clever cosy crafty curious dapper daring deft diligent docile eager
    earnest easy elegant exact fair famed fearless feisty festive fleet fluffy fond frank free fresh
    gentle giddy glad graceful grand hale handy happy hardy hasty hearty honest humble jaunty jolly
    jovial keen kind lanky lean lithe lively loyal lucky mellow merry mighty mild modest neat nifty
    nimble noble patient peppy placid plucky polite proud prudent quick quiet quirky rapid ready regal
    robust rugged sage savvy serene sharp shy silent sleek sly smart snug sociable solid spry stable
    steady stealthy sturdy subtle sunny swift tame tender thrifty tidy tiny tough tranquil trusty
    valiant vast vivid wary wily wise witty zany zesty
    """.split()
)

COLOURS = tuple(
    """
    amber apricot aqua ash auburn azure beige bistre black blond blue bronze brown buff carmine cerise
    cherry chestnut cobalt copper coral cream crimson cyan dove ebony ecru emerald fawn flame flaxen
    fuchsia ginger gold green grey hazel henna honey indigo iris ivory jade jet khaki lavender lemon
    lilac lime linen magenta mahogany maroon mauve melon mint moss mustard navy ochre olive onyx opal
    orange orchid peach pearl pine pink platinum plum purple quartz raven red rose ruby russet rust
    saffron sage salmon sand sapphire scarlet sepia sienna silver slate snow steel tan tawny teal topaz
    umber violet white yellow
    """.split()
)

ANIMALS = tuple(
    """
    aardvark addax alpaca ant anteater antelope armadillo auk badger barracuda bat bear beaver bee bison
    boa bobcat bonobo buffalo butterfly camel caracal caribou cassowary cat chameleon cheetah chinchilla
    chipmunk civet clam cobra condor cougar coyote crab crane cricket crow curlew deer dingo dolphin
    donkey dormouse dove dragonfly duck eagle echidna eel egret eland elephant elk emu ermine falcon
    ferret finch firefly flamingo fox frog gannet gazelle gecko gerbil gibbon giraffe gnu goat goose
    gopher grouse gull hamster hare hawk hedgehog heron hippo hornet horse hummingbird hyena ibex ibis
    iguana impala jackal jaguar jay jellyfish kangaroo kingfisher kiwi koala kudu lark lemming lemur
    leopard lion lizard llama lobster lynx macaw magpie manatee mandrill mantis marmot marten meerkat
    mink mole mongoose moose moth mouse mule narwhal newt nightingale ocelot octopus okapi opossum orca
    oryx osprey ostrich otter owl ox oyster panda panther parrot partridge pelican penguin pheasant
    pigeon platypus pony porcupine porpoise puffin puma quail quokka rabbit raccoon ram raven reindeer
    robin salamander salmon sandpiper seahorse seal serval shark sheep shrew skunk sloth snail sparrow
    spider squid squirrel starling stingray stoat stork swallow swan tamarin tapir tern tiger toad
    tortoise toucan trout turtle viper vole vulture wallaby walrus warbler wasp weasel whale wildebeest
    wolf wolverine wombat woodpecker wren yak zebra
    """.split()
)
